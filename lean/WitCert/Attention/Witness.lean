import WitCert.Algebra.Sum
/-!
# The deterministic tier: from a stored witness to a radius

The witness of a token is, per band of rotary pairs, a number `w_b ≥ ‖(k̃ - k)_b‖`. A norm bound is written without
square roots: `NormLe k v ρ` says `0 ≤ ρ` and `Σ v² ≤ ρ²`. The logit error is at most `|scale| Σ_b ‖q_b‖ w_b`; a pair
rotation keeps each band's norm and `mscale` multiplies it, so a witness taken before RoPE serves after it.
-/
set_option synthInstance.maxSize 4000
universe u v w
namespace WitCert
variable {α : Type u} [OrderedField α] {ι : Type v} {κ : Type w}

/-- Inner product over the coordinates `k`. -/
def dot (k : List κ) (q d : κ → α) : α := sum (fun j => q j * d j) k
/-- `‖v‖ ≤ ρ` over the coordinates `k`. -/
def NormLe (k : List κ) (v : κ → α) (ρ : α) : Prop := 0 ≤ ρ ∧ dot k v v ≤ ρ * ρ

/-! ### Norms -/
theorem abs_dot_le (k : List κ) (q d : κ → α) {n m : α} (hn : NormLe k q n) (hm : NormLe k d m) : abs (dot k q d) ≤ n * m :=
  abs_le_of_sq_le (nonneg_mul hn.1 hm.1)
    (le_trans (cauchy_schwarz q d k)
      (le_trans (mul_le_mul (sum_nonneg k (fun _ => sq_nonneg _)) (nonneg_mul hm.1 hm.1) hn.2 hm.2) (le_of_eq (by ring))))
theorem dot_self_add (k : List κ) (v w : κ → α) :
    dot k (fun j => v j + w j) (fun j => v j + w j) = 1 * dot k v v + 2 * dot k v w + 1 * dot k w w :=
  (sum_congr k (g := fun j => 1 * (v j * v j) + 2 * (v j * w j) + 1 * (w j * w j)) (fun _ => by ring)).trans (sum_lin3 1 2 1 _ _ _ k)
theorem NormLe.add {k : List κ} {v w : κ → α} {ρ σ : α} (hv : NormLe k v ρ) (hw : NormLe k w σ) :
    NormLe k (fun j => v j + w j) (ρ + σ) := by
  constructor
  · exact add_nonneg hv.1 hw.1
  · rw [dot_self_add]
    have h := le_trans (le_abs _) (abs_dot_le k v w hv hw)
    exact le_cert (add_nonneg (add_nonneg (sub_nonneg hv.2) (sub_nonneg hw.2)) (nonneg_mul zero_le_two (sub_nonneg h))) (by ring)
theorem dot_smul (c : α) (k : List κ) (v : κ → α) : dot k (fun j => c * v j) (fun j => c * v j) = c * c * dot k v v :=
  (sum_congr k (g := fun j => c * c * (v j * v j)) (fun _ => by ring)).trans (sum_mul _ _ k)
theorem NormLe.smul {k : List κ} {v : κ → α} {ρ : α} (c : α) (hv : NormLe k v ρ) : NormLe k (fun j => c * v j) (abs c * ρ) := by
  constructor
  · exact nonneg_mul (abs_nonneg c) hv.1
  · rw [dot_smul, ← abs_mul_self]
    exact le_cert (nonneg_mul (sq_nonneg (abs c)) (sub_nonneg hv.2)) (by ring)
theorem NormLe.congr {k : List κ} {v w : κ → α} {ρ : α} (hv : NormLe k v ρ) (h : ∀ j, w j = v j) : NormLe k w ρ := by
  have e : w = v := funext h
  rw [e]; exact hv
theorem NormLe.zero (k : List κ) : NormLe k (fun _ => (0 : α)) 0 :=
  ⟨le_refl 0, le_of_eq ((sum_congr k (g := fun _ => 0 * (0 : α)) (fun _ => by ring)).trans ((sum_mul 0 (fun _ => (0 : α)) k).trans (by ring)))⟩

/-- **Rounding a norm up keeps the bound.**

Code: `witcert_core.cache.norm_codes.encode_norm_up` (uint8 codes, rounded up).
`python: all(norm_sq(band(d, b)) <= witness(d)[b] ** 2 for b in bands)` -/
theorem NormLe.round_up {k : List κ} {v : κ → α} {ρ σ : α} (hv : NormLe k v ρ) (h : ρ ≤ σ) : NormLe k v σ :=
  ⟨le_trans hv.1 h, le_trans hv.2 (mul_le_mul hv.1 (le_trans hv.1 h) h h)⟩

/-- **Re-quantizing adds its rounding**: from `‖k̃ - k‖ ≤ w` and `‖k̃' - k̃‖ ≤ w'` follows `‖k̃' - k‖ ≤ w + w'`.

Code: `witcert_core.cache.norm_codes.value_codes`, `witcert_core.cache.norm_codes.witness_codes` (an entry written again).
`python: norm_sq(sub(k_again, k)) <= (value_witness(sub(k_tilde, k)) + value_witness(sub(k_again, k_tilde))) ** 2` -/
theorem requantize_adds (k : List κ) (x y y' : κ → α) {ρ σ : α} (h1 : NormLe k (fun j => y j - x j) ρ)
    (h2 : NormLe k (fun j => y' j - y j) σ) : NormLe k (fun j => y' j - x j) (ρ + σ) :=
  (h1.add h2).congr (fun j => by ring)

/-- **A residual bounded per channel.** `|v_j| ≤ e` on channels whose number is at most `n²` gives `‖v‖ ≤ n e`: the
group witness of the INT8 layout (`n = √32`, `e = s/2`).

Code: `witcert_core.quantizers.dither.decode_group_witness` (code 255 is this radius).
`python: all(norm_sq(group(residual, j)) <= len(group(residual, j)) * (steps[j] / 2) ** 2 for j in groups)` -/
theorem group_norm (k : List κ) (v : κ → α) {e n : α} (he : 0 ≤ e) (hn : 0 ≤ n) (hv : ∀ j, abs (v j) ≤ e)
    (hk : sum (fun _ => (1 : α)) k ≤ n * n) : NormLe k v (n * e) := by
  refine ⟨nonneg_mul hn he, ?_⟩
  have h1 : dot k v v ≤ sum (fun _ => e * e) k := sum_le k (fun j => by
    rw [← abs_mul_self]
    exact mul_le_mul (abs_nonneg _) he (hv j) (hv j))
  rw [sum_const_mul] at h1
  exact le_trans h1 (le_cert (nonneg_mul (nonneg_mul he he) (sub_nonneg hk)) (by ring))

/-! ### Bands -/

/-- **Band Cauchy–Schwarz.** `|Σ_b ⟨q_b, d_b⟩| ≤ Σ_b ‖q_b‖ w_b`.

Code: `witcert_core.cache.radii.radius_witness`.
`python: abs(dot(q, d)) <= sum(q_norms[b] * witness(d)[b] for b in bands)` -/
theorem abs_bands_le (bands : List ι) (k : ι → List κ) (q d : ι → κ → α) (n w : ι → α)
    (hn : ∀ b, NormLe (k b) (q b) (n b)) (hw : ∀ b, NormLe (k b) (d b) (w b)) :
    abs (sum (fun b => dot (k b) (q b) (d b)) bands) ≤ sum (fun b => n b * w b) bands :=
  le_trans (abs_sum_le _ bands) (sum_le bands (fun b => abs_dot_le (k b) (q b) (d b) (hn b) (hw b)))

/-- **The radius of the deterministic tier.** With `z = scale·⟨q, k⟩` and `z̃ = scale·⟨q, k̃⟩`, `|z̃ - z| ≤ |scale| Σ_b ‖q_b‖ w_b`.

Code: `witcert_core.cache.radii.radius_witness`.
`python: abs(scale * dot(q, k_tilde) - scale * dot(q, k)) <= scale * sum(q_norms[b] * witness(d)[b] for b in bands) <= code_radius_witness` -/
theorem witness_radius (bands : List ι) (k : ι → List κ) (q x y : ι → κ → α) (n w : ι → α) (scale : α)
    (hn : ∀ b, NormLe (k b) (q b) (n b)) (hw : ∀ b, NormLe (k b) (fun j => y b j - x b j) (w b)) :
    abs (scale * sum (fun b => dot (k b) (q b) (y b)) bands - scale * sum (fun b => dot (k b) (q b) (x b)) bands)
      ≤ abs scale * sum (fun b => n b * w b) bands := by
  have e : scale * sum (fun b => dot (k b) (q b) (y b)) bands - scale * sum (fun b => dot (k b) (q b) (x b)) bands
      = scale * sum (fun b => dot (k b) (q b) (fun j => y b j - x b j)) bands := by
    have e1 : sum (fun b => dot (k b) (q b) (fun j => y b j - x b j)) bands
        = sum (fun b => dot (k b) (q b) (y b)) bands - sum (fun b => dot (k b) (q b) (x b)) bands := by
      rw [← sum_sub]
      refine sum_congr bands (fun b => ?_)
      exact (sum_congr (k b) (fun j => by ring)).trans (sum_sub (fun j => q b j * y b j) (fun j => q b j * x b j) (k b))
    rw [e1]; ring
  rw [e, abs_mul]
  exact mul_le_mul_left (abs_nonneg scale) (abs_bands_le bands k q _ n w hn hw)

/-! ### Rotary pairs -/

/-- The coordinates of a list of rotary pairs: each pair `j` has the two channels `(j, false)` and `(j, true)`. -/
def channels : List κ → List (κ × Bool)
  | .nil => .nil
  | .cons j l => .cons (j, false) (.cons (j, true) (channels l))
/-- Rotation of every pair `j` by an angle with cosine `c j` and sine `s j`. -/
def rope (c s : κ → α) (v : κ × Bool → α) : κ × Bool → α := fun p =>
  cond p.2 (s p.1 * v (p.1, false) + c p.1 * v (p.1, true)) (c p.1 * v (p.1, false) - s p.1 * v (p.1, true))

/-- **A pair rotation keeps inner products**, band by band.

Code: `witcert_core.quantizers.rotary.RotaryTable.rotate`.
`python: dot(rotated(q), rotated(d)) == dot(q, d)` -/
theorem rope_dot {c s : κ → α} (h : ∀ j, c j * c j + s j * s j = 1) (l : List κ) (q d : κ × Bool → α) :
    dot (channels l) (rope c s q) (rope c s d) = dot (channels l) q d := by
  induction l with
  | nil => rfl
  | cons j l ih =>
    show (c j * q (j, false) - s j * q (j, true)) * (c j * d (j, false) - s j * d (j, true))
        + ((s j * q (j, false) + c j * q (j, true)) * (s j * d (j, false) + c j * d (j, true)) + dot (channels l) (rope c s q) (rope c s d))
      = q (j, false) * d (j, false) + (q (j, true) * d (j, true) + dot (channels l) q d)
    rw [ih]
    exact eq_lin (h j) (q (j, false) * d (j, false) + q (j, true) * d (j, true)) (by ring)
theorem rope_sub (c s : κ → α) (v w : κ × Bool → α) (p : κ × Bool) :
    rope c s (fun p => v p - w p) p = rope c s v p - rope c s w p := by
  cases p with
  | mk j b => cases b with
    | false => show c j * (v (j, false) - w (j, false)) - s j * (v (j, true) - w (j, true)) = c j * v (j, false) - s j * v (j, true) - (c j * w (j, false) - s j * w (j, true)); ring
    | true => show s j * (v (j, false) - w (j, false)) + c j * (v (j, true) - w (j, true)) = s j * v (j, false) + c j * v (j, true) - (s j * w (j, false) + c j * w (j, true)); ring

/-- **A pair rotation keeps each band's norm**, so the witness.

Code: `witcert_core.cache.bands.band_map` (bands of whole pairs).
`python: all(norm_sq(band(rotated(d), b)) == norm_sq(band(d, b)) for b in bands)` -/
theorem rope_norm {c s : κ → α} (h : ∀ j, c j * c j + s j * s j = 1) (l : List κ) {v : κ × Bool → α} {ρ : α}
    (hv : NormLe (channels l) v ρ) : NormLe (channels l) (rope c s v) ρ :=
  ⟨hv.1, le_trans (le_of_eq (rope_dot h l v v)) hv.2⟩

/-- **`mscale` multiplies the witness** (YaRN is not a rotation alone): `‖m v‖ ≤ |m| ρ`.

Code: `witcert_core.cache.bands.BandMap.norms` (a pre-RoPE witness is multiplied by `mscale`).
`python: all(norm_sq(band(scaled(d), b)) == m ** 2 * norm_sq(band(d, b)) for b in bands)` -/
theorem mscale_norm {k : List κ} {v : κ → α} {ρ : α} (m : α) (hv : NormLe k v ρ) : NormLe k (fun j => m * v j) (abs m * ρ) := hv.smul m

/-- **A witness taken before RoPE bounds the score error after it**: with `k_post = rope(m·k_pre)`,
`|scale·⟨q, k̃_post⟩ - scale·⟨q, k_post⟩| ≤ |scale| Σ_b ‖q_b‖ |m| w_b`, `w_b ≥ ‖(k̃_pre - k_pre)_b‖`.

Code: `witcert_core.cache.radii.radius_witness` with a pre-RoPE quantizer.
`python: abs(scale * dot(q, rotated(scaled(k_tilde))) - scale * dot(q, rotated(scaled(k)))) <= scale * sum(q_norms[b] * m * witness(d)[b] for b in bands)` -/
theorem witness_before_rope {c s : κ → α} (h : ∀ j, c j * c j + s j * s j = 1) (bands : List ι) (l : ι → List κ)
    (q x y : ι → κ × Bool → α) (n w : ι → α) (scale m : α)
    (hn : ∀ b, NormLe (channels (l b)) (q b) (n b)) (hw : ∀ b, NormLe (channels (l b)) (fun p => y b p - x b p) (w b)) :
    abs (scale * sum (fun b => dot (channels (l b)) (q b) (rope c s (fun p => m * y b p))) bands
        - scale * sum (fun b => dot (channels (l b)) (q b) (rope c s (fun p => m * x b p))) bands)
      ≤ abs scale * sum (fun b => n b * (abs m * w b)) bands :=
  witness_radius bands (fun b => channels (l b)) q _ _ n (fun b => abs m * w b) scale hn (fun b =>
    (rope_norm h (l b) (mscale_norm m (hw b))).congr (fun p => by
      rw [← rope_sub]
      exact congr (congrArg (rope c s) (funext (fun p => show m * y b p - m * x b p = m * (y b p - x b p) from by ring))) rfl))

/-- **Bands must not be collapsed.** `Σ_b ‖q_b‖ w_b ≤ N Σ_b w_b` for `N ≥ ‖q_b‖`, and the right side can be larger by
any factor `K`: a key error in a band that the query does not look at.

Code: `witcert_core.cache.radii.radius_witness` (a sum over bands, never `‖q‖·Σ w`).
`python: sum(q_norms[b] * witness(d)[b] for b in bands) <= max(q_norms) * sum(witness(d))` -/
theorem collapse_looser (bands : List ι) (n w : ι → α) (N : α) (hN : ∀ b, n b ≤ N) (hw : ∀ b, 0 ≤ w b) :
    sum (fun b => n b * w b) bands ≤ N * sum w bands ∧
      ∀ K : α, ∃ n' : Bool → α, ∃ w' : Bool → α, (∀ b, n' b ≤ 1) ∧ K * sum (fun b => n' b * w' b) [true, false] < 1 * sum w' [true, false] := by
  constructor
  · rw [← sum_mul]
    exact sum_le bands (fun b => mul_le_mul_right (hw b) (hN b))
  · intro K
    refine ⟨fun b => cond b 1 0, fun b => cond b 0 1, fun b => ?_, ?_⟩
    · cases b with
      | true => exact le_refl 1
      | false => exact zero_le_one
    · show K * (1 * 0 + (0 * 1 + 0)) < 1 * (0 + (1 + 0))
      exact lt_cert zero_lt_one (by ring)
end WitCert
