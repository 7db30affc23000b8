import WitCert.Attention.Output
/-!
# Lost mass: weights that a kernel casts but does not normalise again

A 16-bit kernel rounds each weight to the values' dtype and divides by the sum of the unrounded ones. What it serves,
`õ = Σ s ṽ`, is not a mean: the served weights, `|s_t - w_t| ≤ u w_t`, sum to some `1 + θ'` with `|θ'| ≤ θ`. The bounds on a
mean speak of `Σ ŵ ṽ` with `ŵ = s/Σ s`, and `‖õ - Σ ŵ ṽ‖ ≤ θ ‖Σ ŵ ṽ‖ ≤ θ/(1 - θ)·‖õ‖` remains whatever the diameter. Weights too
small for the dtype's exponent are off by some `b_t` of their own. The kernel's sum over values is off by some `e`, and its
output is rounded channel by channel.
-/
set_option synthInstance.maxSize 4000
universe u v w
namespace WitCert
variable {α : Type u} [OrderedField α] {ι : Type v} {κ : Type w}

/-- **Lost mass.** Weights rounded with `|s_t - w_t| ≤ u w_t + b_t` have a sum within `u Σ w + Σ b` of `Σ w`.

Code: `witcert_core.meter.kernel_error.mass_error`, `witcert_core.meter.kernel_error.lost_weight`.
`python: abs(sum(served) - 1) <= cast_unit + sum(cast_least) <= code_mass_error` -/
theorem lost_mass {w s b : ι → α} {u : α} (l : List ι) (h : ∀ t, abs (s t - w t) ≤ u * w t + b t) :
    abs (sum s l - sum w l) ≤ u * sum w l + sum b l := by
  rw [← sum_sub, ← sum_mul, ← sum_add]
  exact le_trans (abs_sum_le _ l) (sum_le l h)

/-- Weights divided by their sum. -/
def share (s : ι → α) (l : List ι) (t : ι) : α := s t / sum s l
theorem share_eq (s : ι → α) (l : List ι) (t : ι) : share s l t = (sum s l)⁻¹ * s t := by
  show s t / sum s l = _
  rw [div_eq]
  exact mul_comm _ _
theorem share_mean (s f : ι → α) (l : List ι) : sum (fun t => share s l t * f t) l = (sum s l)⁻¹ * sum (fun t => s t * f t) l := by
  rw [← sum_mul]
  exact sum_congr l (fun t => by rw [share_eq]; ring)
theorem share_sum {s : ι → α} {l : List ι} (h : 0 < sum s l) : sum (share s l) l = 1 := by
  rw [sum_congr l (share_eq s l), sum_mul]
  exact (mul_comm _ _).trans (mul_inv_cancel h)
theorem one_add_pos {e u : α} (he : abs e ≤ u) (hu : u < 1) : 1 - u ≤ 1 + e ∧ 0 < 1 + e := by
  have h1 : 1 - u ≤ 1 + e := le_cert (sub_nonneg (le_trans (neg_le_abs e) he)) (by ring)
  exact ⟨h1, lt_of_lt_of_le (pos_of_sub hu) h1⟩
theorem sum_pos_of_near {S θ : α} (h : abs (S - 1) ≤ θ) (hθ : θ < 1) : 0 < S :=
  lt_of_lt_of_le (pos_of_sub hθ) (le_cert (sub_nonneg (le_trans (neg_le_abs (S - 1)) h)) (by ring))
/-- `|1/S - 1| ≤ θ/(1 - θ)`. -/
theorem inv_near {S θ : α} (h : abs (S - 1) ≤ θ) (hθ : θ < 1) : abs (S⁻¹ - 1) ≤ θ / (1 - θ) := by
  have hS := sum_pos_of_near h hθ
  have hi := inv_nonneg hS
  have e : abs (S⁻¹ - 1) = S⁻¹ * abs (S - 1) := by
    rw [← abs_mul_nonneg hi, ← abs_neg]
    exact congrArg abs (eq_lin (mul_inv_cancel hS) (-1) (by ring))
  have h1 : 1 - θ ≤ S := le_cert (sub_nonneg (le_trans (neg_le_abs (S - 1)) h)) (by ring)
  refine le_div (pos_of_sub hθ) ?_
  rw [e]
  have h0 : 0 ≤ θ := le_trans (abs_nonneg _) h
  have h2 : S⁻¹ * abs (S - 1) * (1 - θ) ≤ S⁻¹ * θ * S :=
    mul_le_mul (nonneg_mul hi (abs_nonneg _)) (le_of_lt hS) (mul_le_mul_left hi h) h1
  exact le_trans h2 (le_of_eq (eq_lin (mul_inv_cancel hS) θ (by ring)))

/-- **A sum that is off as well**: cast weights are divided by a sum that is itself off by a share `a`;
`|c| ≤ u` and `|δ| ≤ a < 1` give `|(1 + c)/(1 + δ) - 1| ≤ (1 + u)/(1 - a) - 1`.

Code: `witcert_core.meter.kernel_error.mass_error`.
`python: all(abs((1 + c) / (1 + d) - 1) <= (1 + cast_unit) / (1 - delta) - 1 for c in (-cast_unit, 0, cast_unit) for d in (-delta, 0, delta))` -/
theorem mass_quotient {c δ u a : α} (hc : abs c ≤ u) (hδ : abs δ ≤ a) (ha : a < 1) : abs ((1 + c) / (1 + δ) - 1) ≤ (1 + u) / (1 - a) - 1 := by
  have hv := pos_of_sub ha
  have hp := one_add_pos hδ ha
  have hi := mul_inv_cancel hp.2
  have hj := mul_inv_cancel hv
  have u0 := le_trans (abs_nonneg c) hc
  have a0 := le_trans (abs_nonneg δ) hδ
  have i0 := inv_nonneg hp.2
  have j0 := inv_nonneg hv
  -- 1/(1+δ) ≤ 1/(1-a), and 1/(1+δ) ≥ 2 - 1/(1-a)
  have ij : (1 + δ)⁻¹ ≤ (1 - a)⁻¹ :=
    le_cert (nonneg_mul (nonneg_mul i0 j0) (sub_nonneg hp.1)) (eq_lin2 hi hj (-((1 - a)⁻¹)) ((1 + δ)⁻¹) (by ring))
  have cu := le_trans (le_abs c) hc
  have cl := le_trans (neg_le_abs c) hc
  have dl := le_trans (le_abs δ) hδ
  refine abs_le ?_ ?_
  · have q : (1 + c) * (1 + δ)⁻¹ ≤ (1 + u) * (1 - a)⁻¹ :=
      le_trans (mul_le_mul_right i0 (add_le_add (le_refl 1) cu)) (mul_le_mul_left (add_nonneg zero_le_one u0) ij)
    exact le_cert (sub_nonneg q) (by ring)
  · -- 1 - (1+c)i ≤ (1+u)j - 1: (1+u)j + (1+c)i - 2 = [j + i - 2] + (u j + c i), and u j ≥ u i ≥ -c i
    have m : 2 ≤ (1 - a)⁻¹ + (1 + δ)⁻¹ := by
      have h1 : (1 + δ) ≤ 1 + a := add_le_add (le_refl 1) dl
      have h2 : 1 - a ≤ (1 + δ)⁻¹ := by
        have h3 : (1 - a) * (1 + δ) ≤ 1 := le_cert (add_nonneg (nonneg_mul (le_of_lt hv) (sub_nonneg h1)) (sq_nonneg a)) (by ring)
        exact le_cert (nonneg_mul i0 (sub_nonneg h3)) (eq_lin hi (1 - a) (by ring))
      have h4 : 1 + a ≤ (1 - a)⁻¹ := le_cert (nonneg_mul j0 (sq_nonneg a)) (eq_lin hj (1 + a) (by ring))
      exact le_cert (add_nonneg (sub_nonneg h2) (sub_nonneg h4)) (by ring)
    have n : 0 ≤ u * ((1 - a)⁻¹ - (1 + δ)⁻¹) + (u - -c) * (1 + δ)⁻¹ :=
      add_nonneg (nonneg_mul u0 (sub_nonneg ij)) (nonneg_mul (sub_nonneg cl) i0)
    exact le_cert (add_nonneg (sub_nonneg m) n) (by ring)

/-- **What lost mass costs the output**: if the served weights sum to 1 within `θ`, what is served is within `θ` times the norm
of the mean with the same weights normalised.

Code: `witcert_core.meter.kernel_error.output_error` (`theta`).
`python: norm_sq(sub(average(served, values), average(share(served), values))) <= lost ** 2 * norm_sq(average(share(served), values))` -/
theorem lost_output {s : ι → α} {l : List ι} {θ M : α} (hs : abs (sum s l - 1) ≤ θ) (hS : 0 < sum s l) (k : List κ) (vt : ι → κ → α)
    (hM : NormLe k (fun j => sum (fun t => share s l t * vt t j) l) M) :
    NormLe k (fun j => sum (fun t => s t * vt t j) l - sum (fun t => share s l t * vt t j) l) (θ * M) :=
  ((hM.smul (sum s l - 1)).congr (fun j => by
    rw [share_mean]
    exact eq_lin (mul_inv_cancel hS) (-(sum (fun t => s t * vt t j) l)) (by ring))).round_up (mul_le_mul_right hM.1 hs)

/-- **The same by the norm of what is served**: within `θ/(1 - θ)` of it.

Code: `witcert_core.meter.kernel_error.output_error`.
`python: norm_sq(sub(average(share(served), values), average(served, values))) <= (lost / (1 - lost)) ** 2 * norm_sq(average(served, values))` -/
theorem lost_output_served {s : ι → α} {l : List ι} {θ N : α} (hs : abs (sum s l - 1) ≤ θ) (hθ : θ < 1) (k : List κ) (vt : ι → κ → α)
    (hN : NormLe k (fun j => sum (fun t => s t * vt t j) l) N) :
    NormLe k (fun j => sum (fun t => share s l t * vt t j) l - sum (fun t => s t * vt t j) l) (θ / (1 - θ) * N) :=
  ((hN.smul ((sum s l)⁻¹ - 1)).congr (fun j => by rw [share_mean]; ring)).round_up (mul_le_mul_right hN.1 (inv_near hs hθ))

/-- **A cast moves the normalised weights** by a TV of at most `θ`, where `Σ |s - w| ≤ θ`: the weights of an engine's own
kernel beside those the meter computes again.

Code: `witcert_core.meter.kernel_error.weight_error`.
`python: tv(share(served), head.cell.w) <= lost` -/
theorem cast_tv {w s : ι → α} {l : List ι} {θ : α} (hs0 : ∀ t, 0 ≤ s t) (hw : sum w l = 1)
    (hd : sum (fun t => abs (s t - w t)) l ≤ θ) (hθ : θ < 1) : tv (share s l) w l ≤ θ := by
  have hn : abs (sum s l - 1) ≤ θ := by
    rw [← hw, ← sum_sub]
    exact le_trans (abs_sum_le _ l) hd
  have hS := sum_pos_of_near hn hθ
  have hi := inv_nonneg hS
  have h1 : sum (fun t => abs (share s l t - s t)) l ≤ θ := by
    have e : ∀ t, abs (share s l t - s t) = abs ((sum s l)⁻¹ - 1) * s t := fun t => by
      rw [mul_comm, ← abs_mul_nonneg (hs0 t), share_eq]
      exact congrArg abs (by ring)
    rw [sum_congr l e, sum_mul, mul_comm, ← abs_mul_nonneg (le_of_lt hS), ← abs_neg]
    exact le_trans (le_of_eq (congrArg abs (eq_lin (mul_inv_cancel hS) (-1) (by ring)))) hn
  have h2 : sum (fun t => abs (share s l t - w t)) l ≤ sum (fun t => abs (share s l t - s t)) l + sum (fun t => abs (s t - w t)) l := by
    rw [← sum_add]
    exact sum_le l (fun t => le_trans (le_of_eq (congrArg abs (by ring))) (abs_add (share s l t - s t) (s t - w t)))
  exact div_le zero_lt_two (le_trans h2 (le_trans (add_le_add h1 hd) (le_of_eq (by ring))))

/-- **A rounded output**: channels with `|y_j - o_j| ≤ υ |o_j| + λ`, at most `R²` of them, move it by at most `υ ‖o‖ + R λ`.

Code: `witcert_core.meter.kernel_error.output_error` (`output_unit`, `output_least`).
`python: norm_sq(sub(rounded(average(served, values)), average(served, values))) <= (cast_unit * sqrt_up(norm_sq(average(served, values))) + sqrt_up(Fraction(3)) * output_least) ** 2` -/
theorem rounded_output (k : List κ) (y o : κ → α) {υ lam R N : α} (hυ : 0 ≤ υ) (hlam : 0 ≤ lam) (hR : 0 ≤ R)
    (hk : sum (fun _ => (1 : α)) k ≤ R * R) (hy : ∀ j, abs (y j - o j) ≤ υ * abs (o j) + lam) (hN : NormLe k o N) :
    NormLe k (fun j => y j - o j) (υ * N + R * lam) := by
  have n1 : NormLe k (fun j => υ * abs (o j)) (υ * N) := by
    refine ⟨nonneg_mul hυ hN.1, ?_⟩
    have e : dot k (fun j => υ * abs (o j)) (fun j => υ * abs (o j)) = υ * υ * dot k o o :=
      (sum_congr k (g := fun j => υ * υ * (o j * o j)) (fun j => by rw [← abs_mul_self (o j)]; ring)).trans (sum_mul _ _ k)
    rw [e]
    exact le_trans (mul_le_mul_left (nonneg_mul hυ hυ) hN.2) (le_of_eq (by ring))
  have n2 : NormLe k (fun _ => lam) (R * lam) := group_norm k (fun _ => lam) hlam hR (fun _ => le_of_eq (abs_of_nonneg hlam)) hk
  have n3 := n1.add n2
  refine ⟨n3.1, le_trans (sum_le k (fun j => ?_)) n3.2⟩
  rw [← abs_mul_self (y j - o j)]
  exact mul_le_mul (abs_nonneg _) (add_nonneg (nonneg_mul hυ (abs_nonneg _)) hlam) (hy j) (hy j)

/-- **The norm of the normalised mean**: with `n ≥ ‖Σ w ṽ‖`, a TV of at most `E` between `w` and the served weights normalised, the
diameter `D` and `V ≥ ‖ṽ_t‖`, it is at most `n + E·D` and at most `V`.

Code: `witcert_core.meter.kernel_error.output_error` (`before`).
`python: norm_sq(average(share(served), values)) <= min(sqrt_up(norm_sq(average(head.cell.w, values))) + tv(share(served), head.cell.w) * diam, max(distances([0, 0, 0]))) ** 2` -/
theorem served_mean {w s : ι → α} {l : List ι} {E D n V : α} (hw : sum w l = 1) (hs0 : ∀ t, 0 ≤ s t) (hS : 0 < sum s l)
    (hE : tv w (share s l) l ≤ E) (k : List κ) (vt : ι → κ → α) (hD0 : 0 ≤ D) (hD : ∀ s t, NormLe k (fun j => vt s j - vt t j) D)
    (hn : NormLe k (fun j => sum (fun t => w t * vt t j) l) n) (hV : ∀ t, NormLe k (vt t) V) :
    NormLe k (fun j => sum (fun t => share s l t * vt t j) l - sum (fun t => w t * vt t j) l) (E * D) ∧
    NormLe k (fun j => sum (fun t => share s l t * vt t j) l) (min (n + E * D) V) := by
  have m0 := (transport (hw.trans (share_sum hS).symm) k vt D hD hD0).round_up (mul_le_mul_right hD0 hE)
  have e1 : ∀ j, sum (fun t => (w t - share s l t) * vt t j) l = sum (fun t => w t * vt t j) l - sum (fun t => share s l t * vt t j) l := fun j => by
    rw [← sum_sub]
    exact sum_congr l (fun t => by ring)
  have m : NormLe k (fun j => sum (fun t => share s l t * vt t j) l - sum (fun t => w t * vt t j) l) (E * D) :=
    ((m0.smul (-1)).congr (fun j => by rw [e1 j]; ring)).round_up (le_of_eq (by rw [abs_neg, abs_of_nonneg zero_le_one]; ring))
  refine ⟨m, ?_⟩
  have b1 : NormLe k (fun j => sum (fun t => share s l t * vt t j) l) (n + E * D) := (hn.add m).congr (fun j => by ring)
  have b2 : NormLe k (fun j => sum (fun t => share s l t * vt t j) l) V := by
    refine (NormLe.sum l (fun t => (hV t).smul (share s l t))).round_up (le_of_eq ?_)
    rw [sum_congr l (g := fun t => V * share s l t) (fun t => by
      rw [abs_of_nonneg (show 0 ≤ share s l t from div_nonneg (hs0 t) hS)]; ring), sum_mul, share_sum hS]
    ring
  cases min_cases (n + E * D) V with
  | inl h => rw [h.2]; exact b1
  | inr h => rw [h.2]; exact b2

/-- **What a kernel's own arithmetic does to an output.** The engine served `s` with `|Σ s - 1| ≤ θ`, normalised within a TV of `E`
of `w`; its sum over values is off by `e`, `‖e‖ ≤ σ`, and each of at most `R²` channels of the result is rounded. With `B ≥ ‖Σ ŵ ṽ‖`
and the diameter `D`, `‖õ - Σ w ṽ‖ ≤ E·D + θ B + σ + υ((1 + θ) B + σ) + R λ`.

Code: `witcert_core.meter.kernel_error.output_error`, `witcert_core.meter.kernel_error.attention_error`.
`python: norm_sq(sub(rounded(average(served, values)), average(head.cell.w, values))) <= code_kernel_error ** 2` -/
theorem kernel_output {w s : ι → α} {l : List ι} {θ E D B σ υ lam R : α} (hs : abs (sum s l - 1) ≤ θ) (hS : 0 < sum s l)
    (k : List κ) (vt : ι → κ → α) (hm : NormLe k (fun j => sum (fun t => share s l t * vt t j) l - sum (fun t => w t * vt t j) l) (E * D))
    (hB : NormLe k (fun j => sum (fun t => share s l t * vt t j) l) B) (e y : κ → α) (he : NormLe k e σ)
    (hυ : 0 ≤ υ) (hlam : 0 ≤ lam) (hR : 0 ≤ R) (hk : sum (fun _ => (1 : α)) k ≤ R * R)
    (hy : ∀ j, abs (y j - (sum (fun t => s t * vt t j) l + e j)) ≤ υ * abs (sum (fun t => s t * vt t j) l + e j) + lam) :
    NormLe k (fun j => y j - sum (fun t => w t * vt t j) l) (E * D + θ * B + σ + υ * ((1 + θ) * B + σ) + R * lam) := by
  have lo := lost_output hs hS k vt hB
  have ho : NormLe k (fun j => sum (fun t => s t * vt t j) l + e j) ((1 + θ) * B + σ) :=
    (((hB.add lo).add he).congr (fun j => by ring)).round_up (le_of_eq (by ring))
  have r := rounded_output k y (fun j => sum (fun t => s t * vt t j) l + e j) hυ hlam hR hk hy ho
  exact ((((hm.add lo).add he).add r).congr (fun j => by ring)).round_up (le_of_eq (by ring))

namespace Cell
variable (x : Cell α ι)

/-- What is served of the cell's weights with the cast's relative errors `e`. -/
def served (e : ι → α) (t : ι) : α := x.w t * (1 + e t)
/-- The cell of the cast weights: normalised, with radii larger by `-ln(1 - u)`. -/
def withCast (e : ι → α) (u : α) : Cell α ι :=
  ⟨x.l, share (x.served e) x.l, fun t => x.r t / (1 - u), fun t => x.a t / (1 + e t)⟩

variable {x} (h : x.Sound) {e : ι → α} {u : α} (he : ∀ t, abs (e t) ≤ u) (hu : u < 1)
include h he

theorem Sound.served_near (_ : u < 1) : abs (sum (x.served e) x.l - 1) ≤ u := by
  have h1 := lost_mass (w := x.w) (s := x.served e) (b := fun _ => 0) (u := u) x.l (fun t => by
    show abs (x.w t * (1 + e t) - x.w t) ≤ u * x.w t + 0
    rw [show x.w t * (1 + e t) - x.w t = x.w t * e t from by ring, abs_mul_nonneg (h.w_nonneg t)]
    exact le_cert (nonneg_mul (h.w_nonneg t) (sub_nonneg (he t))) (by ring))
  rw [h.w_sum, sum_zero] at h1
  exact le_trans h1 (le_of_eq (by ring))
include hu
/-- **A cast adds to the radius**: the cell of the cast weights, with `e^c/(1 - u)` for `e^c`, is sound.

Code: `witcert_core.meter.kernel_error.kernel_radius` (`cast_radius` covers `-ln(1 - u)`).
`python: all(1 <= r * a / (1 - cast_unit) / (1 + e) and a / (1 + e) <= r / (1 - cast_unit) for r, a, e in zip(head.cell.r, head.cell.a, cast_errors))` -/
theorem Sound.cast_sound : (x.withCast e u).Sound := by
  have hp := fun t => one_add_pos (he t) hu
  have hv := pos_of_sub hu
  have hi := inv_nonneg hv
  have h0 : ∀ t, 0 ≤ u := fun t => le_trans (abs_nonneg _) (he t)
  have hS := sum_pos_of_near (h.served_near he hu) hu
  have r1 : ∀ t, 1 ≤ x.r t / (1 - u) := fun t => le_div hv (le_trans (le_cert (h0 t) (by ring)) (h.one_le_r t))
  refine ⟨fun t => ?_, share_sum hS, r1, fun t => ?_, fun t => ?_⟩
  · exact div_nonneg (nonneg_mul (h.w_nonneg t) (le_of_lt (hp t).2)) hS
  · show 1 ≤ x.r t / (1 - u) * (x.a t / (1 + e t))
    have e1 : 1 + e t ≤ 1 + u := le_cert (sub_nonneg (le_trans (le_abs (e t)) (he t))) (by ring)
    have h1 : (1 - u) * (1 + e t) ≤ 1 :=
      le_cert (add_nonneg (nonneg_mul (le_of_lt hv) (sub_nonneg e1)) (sq_nonneg u)) (by ring)
    have e2 : x.r t / (1 - u) * (x.a t / (1 + e t)) = x.r t * x.a t / ((1 - u) * (1 + e t)) :=
      eq_div (mul_pos hv (hp t).2) (eq_lin2 (mul_inv_cancel hv) (mul_inv_cancel (hp t).2)
        (x.r t * x.a t * ((1 + e t) * (1 + e t)⁻¹)) (x.r t * x.a t) (by ring))
    rw [e2]
    exact le_div (mul_pos hv (hp t).2) (le_trans (le_of_eq (by ring)) (le_trans h1 (h.lower t)))
  · show x.a t / (1 + e t) ≤ x.r t / (1 - u)
    refine div_le (hp t).2 (le_trans (h.upper t) ?_)
    exact le_trans (le_of_eq (div_mul_cancel hv).symm)
      (mul_le_mul_left (div_nonneg (le_of_lt (h.r_pos t)) hv) (hp t).1)
/-- **A cast does not move the target**: exact attention is the same.

Code: `witcert_core.meter.tv.total_variation`.
`python: close(tilted(share(served_relative), [a / (1 + e) for a, e in zip(head.cell.a, cast_errors)]), head.cell.p)` -/
theorem Sound.cast_p (t : ι) : (x.withCast e u).p t = x.p t := by
  have hc := h.cast_sound he hu
  have hp := fun t => (one_add_pos (he t) hu).2
  have e1 : ∀ t, share (x.served e) x.l t * (x.a t / (1 + e t)) = (sum (x.served e) x.l)⁻¹ * (x.w t * x.a t) := fun t => by
    rw [share_eq]
    exact eq_lin (mul_inv_cancel (hp t)) ((sum (x.served e) x.l)⁻¹ * (x.w t * x.a t)) (by
      show _ * (x.w t * (1 + e t)) * (x.a t / (1 + e t)) - _ = _
      ring)
  have e2 : (x.withCast e u).Z = (sum (x.served e) x.l)⁻¹ * x.Z := by
    show sum (fun t => share (x.served e) x.l t * (x.a t / (1 + e t))) x.l = _
    rw [sum_congr x.l e1, sum_mul]
    exact rfl
  refine (eq_div hc.Z_pos ?_).symm
  show x.p t * (x.withCast e u).Z = share (x.served e) x.l t * (x.a t / (1 + e t))
  rw [e1, e2, x.p_eq]
  exact eq_lin h.Zu ((sum (x.served e) x.l)⁻¹ * (x.w t * x.a t)) (by ring)

/-- **Output bound with lost mass.** Whatever bounds `‖o - Σ ŵ ṽ‖` for the cell of the cast weights, what is served is
within `u/(1 - u)·‖õ‖` more of exact attention: `‖o - õ‖ ≤ X + u/(1 - u)·‖õ‖`.

Code: `witcert_core.meter.kernel_error.output_error`.
`python: norm_sq(sub(exact_output, average(served_relative, values))) <= (sqrt_up(norm_sq(sub(exact_output, average(share(served_relative), values)))) + cast_unit / (1 - cast_unit) * sqrt_up(norm_sq(average(served_relative, values)))) ** 2` -/
theorem Sound.output_served (k : List κ) (vt ve : ι → κ → α) {X N : α}
    (hX : NormLe k (fun j => sum (fun t => (x.withCast e u).p t * ve t j) x.l - sum (fun t => (x.withCast e u).w t * vt t j) x.l) X)
    (hN : NormLe k (fun j => sum (fun t => x.served e t * vt t j) x.l) N) :
    NormLe k (fun j => sum (fun t => x.p t * ve t j) x.l - sum (fun t => x.served e t * vt t j) x.l) (X + u / (1 - u) * N) := by
  have n := lost_output_served (h.served_near he hu) hu k vt hN
  refine (hX.add n).congr (fun j => ?_)
  rw [sum_congr x.l (f := fun t => (x.withCast e u).p t * ve t j) (g := fun t => x.p t * ve t j) (fun t => by rw [h.cast_p he hu t])]
  show _ = sum (fun t => x.p t * ve t j) x.l - sum (fun t => share (x.served e) x.l t * vt t j) x.l
    + (sum (fun t => share (x.served e) x.l t * vt t j) x.l - sum (fun t => x.served e t * vt t j) x.l)
  ring
end Cell
end WitCert
