import WitCert.Attention.Extremal
import WitCert.Attention.Forms
import WitCert.Attention.Softmax
/-!
# The gate: repair until the stopping test accepts

Restoring exact keys of a set `R` of tokens changes the compressed weights too: `w' ∝ w·a` on `R` and `w` elsewhere,
radii 0 on `R`. The claim `certified ≤ τ` comes from the stopping test alone. Repair lowers the bound for `tanh`, for
`extremal`, and for `eform` when `A ≤ 2`; it may raise `rms`, `eform` and the true `TV` (`WitCert.Examples.Refuted`), so
the code re-evaluates after every round.
-/
set_option synthInstance.maxSize 4000
universe u v w
namespace WitCert

/-! ### The loop -/
section
variable {β : Type v}
/-- At most `n` rounds: stop when `ok`, else repair one more block. -/
def gateRun (ok : List β → Bool) (next : List β → List β) : Nat → List β → List β
  | .zero, l => l
  | .succ n, l => cond (ok l) l (gateRun ok next n (next l))

/-- **The gate stops after at most #blocks rounds.** If a round takes one block off the list of unrepaired ones and the
test accepts when none is left, the test accepts after at most as many rounds as there are blocks.

Code: `witcert_core.gates` (`certified`).
`python: rounds_used() <= len(blocks()) and accepted(final_state())` -/
theorem gate_stops (ok : List β → Bool) (next : List β → List β) (hnil : ok [] = true)
    (hnext : ∀ b l, (next (.cons b l)).length = l.length) (l : List β) : ok (gateRun ok next l.length l) = true := by
  have key : ∀ n : Nat, ∀ l : List β, l.length = n → ok (gateRun ok next n l) = true := by
    intro n
    induction n with
    | zero =>
      intro l hl
      cases l with
      | nil => exact hnil
      | cons b l => exact Nat.noConfusion hl
    | succ n ih =>
      intro l hl
      show ok (cond (ok l) l (gateRun ok next n (next l))) = true
      cases e : ok l with
      | true => exact e
      | false => cases l with
        | nil => exact absurd (hnil.symm.trans e) (fun k => Bool.noConfusion k)
        | cons b l => exact ih (next (.cons b l)) ((hnext b l).trans (congrArg Nat.pred hl))
  exact key l.length l rfl

/-- **`certified ≤ τ` comes from the stopping test.** Whatever the repairs did, if the test accepts only states in which
every cell's meter is at most `τ`, and every meter bounds its `TV`, the final state has `TV ≤ τ` in every cell.

Code: `witcert_core.gates` (`certified`, `combined`).
`python: not accepted(final_state()) or tv_final() <= tau()` -/
theorem certified_claim {α : Type u} [OrderedField α] {ι γ : Type w} (cell : List β → γ → Cell α ι) (meter : List β → γ → α) (τ : α)
    (hmeter : ∀ l g, (cell l g).TV ≤ meter l g) (ok : List β → Bool) (hok : ∀ l, ok l = true → ∀ g, meter l g ≤ τ)
    (next : List β → List β) (hnil : ok [] = true) (hnext : ∀ b l, (next (.cons b l)).length = l.length) (l : List β) (g : γ) :
    (cell (gateRun ok next l.length l) g).TV ≤ τ :=
  le_trans (hmeter _ g) (hok _ (gate_stops ok next hnil hnext l) g)
end

namespace Cell
variable {α : Type u} [OrderedField α] {ι : Type v}

/-- `1` on the repaired tokens. -/
def mask (R : ι → Bool) (t : ι) : α := cond (R t) 1 0
/-- The factor by which a repair tilts the weights: the exact ratio on `R`, `1` elsewhere. -/
def tilt (x : Cell α ι) (R : ι → Bool) (t : ι) : α := cond (R t) (x.a t) 1
/-- The cell after the exact keys of the tokens of `R` are back. -/
def repair (x : Cell α ι) (R : ι → Bool) : Cell α ι where
  l := x.l
  w := fun t => x.w t * x.tilt R t / x.mean (x.tilt R)
  r := fun t => cond (R t) 1 (x.r t)
  a := fun t => cond (R t) 1 (x.a t)

variable {x : Cell α ι} (h : x.Sound) (R : ι → Bool)

theorem repair_mean (f : ι → α) : (x.repair R).mean f = (x.mean (x.tilt R))⁻¹ * x.mean (fun t => x.tilt R t * f t) :=
  (sum_congr x.l (fun t => show x.w t * x.tilt R t / x.mean (x.tilt R) * f t = (x.mean (x.tilt R))⁻¹ * (x.w t * (x.tilt R t * f t)) from by ring)).trans
    (sum_mul _ _ x.l)
include h
theorem Sound.tilt_lower (t : ι) : 1 ≤ x.r t * x.tilt R t := by
  show 1 ≤ x.r t * cond (R t) (x.a t) 1
  cases R t with
  | true => exact h.lower t
  | false => exact le_trans (h.one_le_r t) (le_of_eq (show x.r t = x.r t * 1 from by ring))
theorem Sound.tilt_upper (t : ι) : x.tilt R t ≤ x.r t := by
  show cond (R t) (x.a t) 1 ≤ x.r t
  cases R t with
  | true => exact h.upper t
  | false => exact h.one_le_r t
theorem Sound.tilt_nonneg (t : ι) : 0 ≤ x.tilt R t := nonneg_of_mul (h.r_pos t) (le_trans zero_le_one (h.tilt_lower R t))
theorem Sound.tilt_pos : 0 < x.mean (x.tilt R) := by
  have k := h.one_le_mean_mul h.r_pos (h.tilt_lower R) h.A_pos
  refine lt_of_le_of_ne (h.mean_nonneg (h.tilt_nonneg R)) (fun e => ?_)
  rw [e] at k
  exact zero_lt_one (le_trans k (le_of_eq (show x.mean x.r * 0 = 0 from by ring)))

/-- **A repaired cell is sound again**, with the new weights.

Code: `witcert_core.gates` (recompute `p̃` and `c`, then re-evaluate).
`python: sum(repaired_cell().w) == 1 and sound(repaired_cell())` -/
theorem Sound.repair_sound : (x.repair R).Sound where
  w_nonneg := fun t => div_nonneg (nonneg_mul (h.w_nonneg t) (h.tilt_nonneg R t)) (h.tilt_pos R)
  w_sum := by
    refine Eq.trans ?_ (mul_inv_cancel (h.tilt_pos R))
    refine (sum_congr x.l (fun t => show x.w t * x.tilt R t / x.mean (x.tilt R) = (x.mean (x.tilt R))⁻¹ * (x.w t * x.tilt R t) from by ring)).trans ((sum_mul _ _ x.l).trans (mul_comm _ _))
  one_le_r := fun t => by
    show 1 ≤ cond (R t) 1 (x.r t)
    cases R t with
    | true => exact le_refl 1
    | false => exact h.one_le_r t
  lower := fun t => by
    show 1 ≤ cond (R t) 1 (x.r t) * cond (R t) 1 (x.a t)
    cases R t with
    | true => exact le_of_eq (show (1 : α) = 1 * 1 from by ring)
    | false => exact h.lower t
  upper := fun t => by
    show cond (R t) 1 (x.a t) ≤ cond (R t) 1 (x.r t)
    cases R t with
    | true => exact le_refl 1
    | false => exact h.upper t

/-- **Repair does not move the target**: exact attention is the same before and after.

Code: `witcert_core.tv.total_variation` (`p` does not depend on what was repaired).
`python: exact_p(repaired_cell()) == exact_p(cell())` -/
theorem Sound.repair_p (t : ι) : (x.repair R).p t = x.p t := by
  have e : ∀ t, x.tilt R t * (x.repair R).a t = x.a t := fun t => by
    show cond (R t) (x.a t) 1 * cond (R t) 1 (x.a t) = x.a t
    cases R t with
    | true => show x.a t * 1 = x.a t; ring
    | false => show 1 * x.a t = x.a t; ring
  have hZ : (x.repair R).Z = (x.mean (x.tilt R))⁻¹ * x.Z := (repair_mean R _).trans (congrArg (fun v => (x.mean (x.tilt R))⁻¹ * v) (x.mean_congr e))
  have hD := mul_inv_cancel (h.tilt_pos R)
  have hZ0 := mul_inv_cancel h.Z_pos
  have hp := (h.repair_sound R).Z_pos
  refine (eq_div (x := x.p t) hp ?_).symm
  show x.w t * x.a t / x.Z * (x.repair R).Z = x.w t * x.tilt R t / x.mean (x.tilt R) * (x.repair R).a t
  rw [hZ, show x.w t * x.tilt R t / x.mean (x.tilt R) * (x.repair R).a t = x.w t / x.mean (x.tilt R) * (x.tilt R t * (x.repair R).a t) from by ring, e t]
  exact eq_lin hZ0 (x.w t * x.a t * (x.mean (x.tilt R))⁻¹) (by ring)

/-- **When every block is repaired nothing is left**: `TV = 0`.

Code: `witcert_core.gates` (all radii 0).
`python: tv_of_case(all_repaired()) == 0` -/
theorem Sound.repair_all (hR : ∀ t, R t = true) : (x.repair R).TV = 0 :=
  (h.repair_sound R).tv_common_shift 1 (fun t => by
    show cond (R t) 1 (x.a t) = 1
    rw [hR t]; rfl)

/-- **tanh never rises under repair**: a bound on the radii stays one.

Code: `witcert_core.bounds.tanh.bound`.
`python: form_of("tanh", repaired_cell()) <= form_of("tanh", cell())` -/
theorem Sound.repair_tanh {M : α} (hM : ∀ t, x.r t ≤ M) : (∀ t, (x.repair R).r t ≤ M) ∧ (x.repair R).TV ≤ (M - 1) / (M + 1) := by
  have k : ∀ t, (x.repair R).r t ≤ M := fun t => by
    show cond (R t) 1 (x.r t) ≤ M
    cases R t with
    | true => exact le_trans (h.one_le_r t) (hM t)
    | false => exact hM t
  exact ⟨k, (h.repair_sound R).tv_le_tanh M k⟩

omit h in
/-- Splitting a mean along the mask. -/
theorem mean_mask (f : ι → α) : x.mean f = x.mean (fun t => (1 - mask R t) * f t) + x.mean (fun t => mask R t * f t) := by
  rw [← mean_add]; exact x.mean_congr (fun t => by ring)
omit h in
theorem mask_nonneg (t : ι) : (0 : α) ≤ mask R t ∧ (0 : α) ≤ 1 - mask R t := by
  show (0 : α) ≤ cond (R t) 1 0 ∧ (0 : α) ≤ 1 - cond (R t) 1 0
  cases R t with
  | true => exact ⟨zero_le_one, le_of_eq (show (0 : α) = 1 - 1 from by ring)⟩
  | false => exact ⟨le_refl 0, nonneg_cert zero_le_one (show (1 : α) - 0 = 1 from by ring)⟩
theorem Sound.tilt_mean : x.mean (x.tilt R) = 1 - x.mean (mask R) + x.mean (fun t => mask R t * x.a t) := by
  refine (x.mean_congr (g := fun t => 1 * (mask R t * x.a t) + -1 * mask R t + 1) (fun t => ?_)).trans ((h.mean_lin2 1 (-1) 1 _ _).trans (by ring))
  show cond (R t) (x.a t) 1 = 1 * (cond (R t) 1 0 * x.a t) + -1 * cond (R t) 1 0 + 1
  cases R t with
  | true => show x.a t = 1 * (1 * x.a t) + -1 * 1 + 1; ring
  | false => show (1 : α) = 1 * (0 * x.a t) + -1 * 0 + 1; ring

/-- **eform does not rise while `A ≤ 2`**: repair gives `A' ≤ A`.

Code: `witcert_core.bounds.eform.bound`.
`python: cell().A > 2 or repaired_cell().A <= cell().A` -/
theorem Sound.repair_A_le (hA : x.A ≤ 2) : (x.repair R).A ≤ x.A := by
  have hD := h.tilt_pos R
  have hDe := h.tilt_mean R
  -- X, B: Σ w r outside and inside R; Y = Σ_R w a; ρ the mass of R
  have eA : x.A = x.mean (fun t => (1 - mask R t) * x.r t) + x.mean (fun t => mask R t * x.r t) := mean_mask R x.r
  have eA' : x.mean (fun t => x.tilt R t * (x.repair R).r t) = x.mean (fun t => (1 - mask R t) * x.r t) + x.mean (fun t => mask R t * x.a t) := by
    rw [← mean_add]
    refine x.mean_congr (fun t => ?_)
    show cond (R t) (x.a t) 1 * cond (R t) 1 (x.r t) = (1 - cond (R t) 1 0) * x.r t + cond (R t) 1 0 * x.a t
    cases R t with
    | true => show x.a t * 1 = (1 - 1) * x.r t + 1 * x.a t; ring
    | false => show 1 * x.r t = (1 - 0) * x.r t + 0 * x.a t; ring
  have hBY : x.mean (mask R) * x.mean (mask R) ≤ x.mean (fun t => mask R t * x.a t) * x.mean (fun t => mask R t * x.r t) := by
    refine le_trans (sum_sq_le_of_one_le_mul (fun t => nonneg_mul (h.w_nonneg t) (mask_nonneg R t).1) h.a_nonneg (fun t => le_of_lt (h.r_pos t)) h.lower x.l) (le_of_eq ?_)
    exact mul_congr (sum_congr x.l (fun t => by ring)) (sum_congr x.l (fun t => by ring))
  have hρB : x.mean (mask R) ≤ x.mean (fun t => mask R t * x.r t) :=
    h.mean_le (fun t => le_cert (nonneg_mul (mask_nonneg R t).1 (sub_nonneg (h.one_le_r t))) (by ring))
  have hYB : x.mean (fun t => mask R t * x.a t) ≤ x.mean (fun t => mask R t * x.r t) :=
    h.mean_le (fun t => mul_le_mul_left (mask_nonneg R t).1 (h.upper t))
  have hρ : 0 ≤ x.mean (mask R) := h.mean_nonneg (fun t => (mask_nonneg R t).1)
  have hY : 0 ≤ x.mean (fun t => mask R t * x.a t) := h.mean_nonneg (fun t => nonneg_mul (mask_nonneg R t).1 (h.a_nonneg t))
  have hA1 := h.one_le_A
  refine le_trans (le_of_eq (repair_mean R (x.repair R).r)) (le_of_mul_le hD ?_)
  rw [eA', show x.mean (x.tilt R) * ((x.mean (x.tilt R))⁻¹ * (x.mean (fun t => (1 - mask R t) * x.r t) + x.mean (fun t => mask R t * x.a t)))
      = x.mean (fun t => (1 - mask R t) * x.r t) + x.mean (fun t => mask R t * x.a t) from
    eq_lin (mul_inv_cancel hD) (x.mean (fun t => (1 - mask R t) * x.r t) + x.mean (fun t => mask R t * x.a t)) (by ring), hDe]
  generalize x.mean (fun t => (1 - mask R t) * x.r t) = X at eA
  generalize x.mean (fun t => mask R t * x.r t) = B at eA hBY hρB hYB
  generalize x.mean (fun t => mask R t * x.a t) = Y at hBY hYB hY
  generalize x.mean (mask R) = ρ at hBY hρB hρ
  rw [eA] at hA hA1 ⊢
  cases le_or_lt B 0 with
  | inl z =>
    have eρ : ρ = 0 := le_antisymm (le_trans hρB z) hρ
    have eY : Y = 0 := le_antisymm (le_trans hYB z) hY
    have eB : B = 0 := le_antisymm z (le_trans hY hYB)
    rw [eρ, eY, eB]
    exact le_of_eq (by ring)
  | inr p =>
    refine le_of_mul_le p ?_
    have k1 : 0 ≤ (X + B - 1) * (Y * B - ρ * ρ) := nonneg_mul (sub_nonneg hA1) (sub_nonneg hBY)
    have k2 : 0 ≤ (B - ρ) * (B - ρ + ρ * (2 - (X + B))) := nonneg_mul (sub_nonneg hρB) (add_nonneg (sub_nonneg hρB) (nonneg_mul hρ (sub_nonneg hA)))
    exact le_cert (add_nonneg k1 k2) (by ring)

/-! ### The extremal bound never rises -/

/-- In the repaired cell some best attack leaves the repaired tokens alone. -/
theorem Sound.avoid_repaired {M : α} (hM : ∀ t, x.r t ≤ M) {s : ι → α} (hs : IsFrac s) :
    ∃ s', IsFrac s' ∧ (∀ t, R t = true → s' t = 0) ∧ (x.repair R).attackValue s ≤ (x.repair R).attackValue s' := by
  have hy := h.repair_sound R
  have rR : ∀ t, R t = true → (x.repair R).r t = 1 := fun t e => by
    show cond (R t) 1 (x.r t) = 1
    rw [e]; rfl
  have f1 : IsFrac ((x.repair R).upper 1 0) := (x.repair R).upper_isFrac (le_refl 0) (nonneg_cert zero_le_one (by ring))
  cases hy.attack_le_upper M (h.repair_tanh R hM).1 hs with
  | intro θ H => cases H with
    | intro τ H =>
      have hf := (x.repair R).upper_isFrac (θ := θ) H.1 H.2.1
      cases le_or_lt θ 1 with
      | inr c => exact ⟨_, hf, fun t e => (x.repair R).upper_below (by rw [rR t e]; exact c), H.2.2⟩
      | inl c =>
        -- θ ≤ 1: everything above 1 is raised; lowering the tokens at 1 does not hurt
        refine ⟨(x.repair R).upper 1 0, f1, fun t e => (x.repair R).upper_zero (le_of_eq (rR t e)), le_trans H.2.2 ?_⟩
        have k1 := hy.attackValue_mul hf
        have k2 := hy.attackValue_mul f1
        have p1 := hy.z_pos hf
        have p2 := hy.z_pos f1
        -- on tokens where the two sets differ r = 1, so Z is the same and the difference of up equals that of the masses
        have cases1 : ∀ t, (x.repair R).upper 1 0 t = (x.repair R).upper θ τ t ∨ ((x.repair R).r t = 1 ∧ (x.repair R).upper 1 0 t = 0) := fun t => by
          cases le_or_lt ((x.repair R).r t) 1 with
          | inl d => exact Or.inr ⟨le_antisymm d (hy.one_le_r t), (x.repair R).upper_zero d⟩
          | inr d => exact Or.inl (by rw [(x.repair R).upper_above d, (x.repair R).upper_above (lt_of_le_of_lt c d)])
        have eZ : (x.repair R).up ((x.repair R).upper θ τ) + (x.repair R).lo ((x.repair R).upper θ τ) = (x.repair R).up ((x.repair R).upper 1 0) + (x.repair R).lo ((x.repair R).upper 1 0) := by
          rw [z_eq, z_eq]
          refine (x.repair R).mean_congr (fun t => ?_)
          cases cases1 t with
          | inl e => rw [e]
          | inr e =>
            have i := hy.r_inv t
            rw [e.1] at i
            rw [e.1, e.2]
            exact eq_lin i (-((x.repair R).upper θ τ t)) (by ring)
        have eU : (x.repair R).up ((x.repair R).upper θ τ) - (x.repair R).up ((x.repair R).upper 1 0) = (x.repair R).mean ((x.repair R).upper θ τ) - (x.repair R).mean ((x.repair R).upper 1 0) := by
          show (x.repair R).mean _ - (x.repair R).mean _ = _
          rw [← mean_sub, ← mean_sub]
          refine (x.repair R).mean_congr (fun t => ?_)
          cases cases1 t with
          | inl e => rw [e]; ring
          | inr e => rw [e.1, e.2]; ring
        have hm : 0 ≤ (x.repair R).mean ((x.repair R).upper θ τ) - (x.repair R).mean ((x.repair R).upper 1 0) := by
          rw [← mean_sub]
          refine hy.mean_nonneg (fun t => ?_)
          cases cases1 t with
          | inl e => rw [e]; exact le_of_eq (by ring)
          | inr e => rw [e.2]; exact nonneg_cert (hf t).1 (by ring)
        have hz1 : 1 ≤ (x.repair R).up ((x.repair R).upper 1 0) + (x.repair R).lo ((x.repair R).upper 1 0) := by
          rw [z_eq]
          refine le_trans (le_of_eq (hy.mean_const 1).symm) (hy.mean_le (fun t => ?_))
          cases le_or_lt ((x.repair R).r t) 1 with
          | inl d =>
            have e : (x.repair R).r t = 1 := le_antisymm d (hy.one_le_r t)
            have i := hy.r_inv t
            rw [e] at i
            rw [(x.repair R).upper_zero d, e]
            exact le_of_eq (eq_lin i (-1) (by ring))
          | inr d =>
            rw [(x.repair R).upper_above d]
            exact le_trans (hy.one_le_r t) (le_of_eq (by ring))
        rw [eZ] at k1
        refine le_of_mul_le p2 (le_trans (le_of_eq (mul_comm _ _)) (le_trans ?_ (le_of_eq (mul_comm _ _))))
        rw [k1, k2]
        exact le_cert (nonneg_mul hm (sub_nonneg hz1)) (eq_lin eU (-1) (by ring))

omit h in
theorem unscale {D φ G U V m : α} (hD : D * φ = 1) (k : G * (φ * U + φ * V) = φ * U - φ * m * (φ * U + φ * V)) :
    G * (U + V) = U - φ * m * (U + V) := eq_lin2 k hD D (-(G * (U + V)) + U - φ * m * (U + V)) (by ring)
omit h in
theorem unscale_pos {D φ U V : α} (h0 : 0 < D) (hD : D * φ = 1) (k : 0 < φ * U + φ * V) : 0 < U + V :=
  lt_of_lt_of_le (mul_pos h0 k) (le_of_eq (eq_lin hD (U + V) (by ring)))
omit h in
theorem grow_step {U V vR Y m φ G F : α} (hU : 0 ≤ U) (hm : 0 ≤ m) (hφ : 1 ≤ φ) (hY : vR ≤ Y) (p : 0 < U + V)
    (hden : 0 < U + (V - vR + Y)) (k : F * (U + V) = U - m * (U + V)) (kv : G * (U + (V - vR + Y)) = U - φ * m * (U + (V - vR + Y))) : G ≤ F := by
  refine le_of_mul_le p (le_of_mul_le hden ?_)
  have g1 : 0 ≤ U * (Y - vR) := nonneg_mul hU (sub_nonneg hY)
  have g2 : 0 ≤ (φ - 1) * m * ((U + V) * (U + (V - vR + Y))) := nonneg_mul (nonneg_mul (sub_nonneg hφ) hm) (nonneg_mul (le_of_lt p) (le_of_lt hden))
  exact le_cert (add_nonneg g1 g2) (eq_lin2 kv k (-(U + V)) (U + (V - vR + Y)) (by ring))
omit h in
theorem shrink_step {U V vR vN Y ρ m φ G F : α} (hU : 0 ≤ U) (hφ : 0 ≤ φ) (hD : (1 - ρ + Y) * φ = 1) (c : 1 ≤ 1 - ρ + Y)
    (hvN : vN ≤ 1 - ρ) (hvρ : vR ≤ ρ) (p : 0 < φ * U + ((1 - φ) * (vN + vR) + φ * V)) (hden : 0 < U + (V - vR + Y))
    (k : F * (φ * U + ((1 - φ) * (vN + vR) + φ * V)) = φ * U - φ * m * (φ * U + ((1 - φ) * (vN + vR) + φ * V)))
    (kv : G * (U + (V - vR + Y)) = U - φ * m * (U + (V - vR + Y))) : G ≤ F := by
  refine le_of_mul_le p (le_of_mul_le hden ?_)
  -- (1 - ρ + Y)(vN + vR) ≤ vN + Y
  have g1 : 0 ≤ (Y - ρ) * (1 - ρ - vN) := nonneg_mul (nonneg_cert (sub_nonneg c) (by ring)) (sub_nonneg hvN)
  have g2 : 0 ≤ (1 - ρ + Y) * (ρ - vR) := nonneg_mul (le_trans zero_le_one c) (sub_nonneg hvρ)
  have g3 : 0 ≤ vN + Y - (1 - ρ + Y) * (vN + vR) := nonneg_cert (add_nonneg g1 g2) (by ring)
  exact le_cert (nonneg_mul (nonneg_mul hU hφ) g3)
    (eq_lin3 k kv hD (U + (V - vR + Y)) (-(φ * U + ((1 - φ) * (vN + vR) + φ * V))) (U * (vN + vR)) (by ring))

/-- **The extremal bound never rises under repair** (tokens divisible): every attack on the repaired cell is matched by
an attack on the cell before.

Code: `witcert_core.bounds.extremal.bound`.
`python: form_of_extremal(repaired_cell()) <= form_of_extremal(cell())` -/
theorem Sound.repair_extremal {M : α} (hM : ∀ t, x.r t ≤ M) {s : ι → α} (hs : IsFrac s) :
    ∃ s', IsFrac s' ∧ (x.repair R).attackValue s ≤ x.attackValue s' := by
  cases h.avoid_repaired R hM hs with
  | intro s₀ H =>
    have hy := h.repair_sound R
    have hD := h.tilt_pos R
    have hDi := mul_inv_cancel hD
    have hDe := h.tilt_mean R
    have hf := H.1
    -- the repaired sums in terms of the original ones
    have eU : (x.repair R).up s₀ = (x.mean (x.tilt R))⁻¹ * x.up s₀ := by
      refine (repair_mean R _).trans (congrArg (fun v => (x.mean (x.tilt R))⁻¹ * v) (x.mean_congr (fun t => ?_)))
      have k := H.2.1 t
      show cond (R t) (x.a t) 1 * (s₀ t * cond (R t) 1 (x.r t)) = s₀ t * x.r t
      revert k
      cases R t with
      | true => exact fun k => by rw [k rfl]; show x.a t * (0 * 1) = 0 * x.r t; ring
      | false => exact fun _ => show 1 * (s₀ t * x.r t) = s₀ t * x.r t from by ring
    have em : (x.repair R).mean s₀ = (x.mean (x.tilt R))⁻¹ * x.mean s₀ := by
      refine (repair_mean R _).trans (congrArg (fun v => (x.mean (x.tilt R))⁻¹ * v) (x.mean_congr (fun t => ?_)))
      have k := H.2.1 t
      show cond (R t) (x.a t) 1 * s₀ t = s₀ t
      revert k
      cases R t with
      | true => exact fun k => by rw [k rfl]; show x.a t * 0 = 0; ring
      | false => exact fun _ => show 1 * s₀ t = s₀ t from by ring
    have eL : (x.repair R).lo s₀ = (x.mean (x.tilt R))⁻¹ * (x.lo s₀ - x.mean (fun t => mask R t * (x.r t)⁻¹) + x.mean (fun t => mask R t * x.a t)) := by
      have e1 : x.lo s₀ - x.mean (fun t => mask R t * (x.r t)⁻¹) + x.mean (fun t => mask R t * x.a t)
          = x.mean (fun t => (1 - s₀ t) * (x.r t)⁻¹ - mask R t * (x.r t)⁻¹ + mask R t * x.a t) := by
        rw [mean_add, mean_sub]; rfl
      rw [e1]
      refine (repair_mean R _).trans (congrArg (fun v => (x.mean (x.tilt R))⁻¹ * v) (x.mean_congr (fun t => ?_)))
      have k := H.2.1 t
      show cond (R t) (x.a t) 1 * ((1 - s₀ t) * (cond (R t) 1 (x.r t))⁻¹) = (1 - s₀ t) * (x.r t)⁻¹ - cond (R t) 1 0 * (x.r t)⁻¹ + cond (R t) 1 0 * x.a t
      revert k
      cases R t with
      | true =>
        intro k
        rw [k rfl]
        show x.a t * ((1 - 0) * (1 : α)⁻¹) = (1 - 0) * (x.r t)⁻¹ - 1 * (x.r t)⁻¹ + 1 * x.a t
        exact eq_lin (mul_inv_cancel (zero_lt_one (α := α))) (x.a t) (by ring)
      | false => exact fun _ => show 1 * ((1 - s₀ t) * (x.r t)⁻¹) = (1 - s₀ t) * (x.r t)⁻¹ - 0 * (x.r t)⁻¹ + 0 * x.a t from by ring
    have hYv : x.mean (fun t => mask R t * (x.r t)⁻¹) ≤ x.mean (fun t => mask R t * x.a t) :=
      h.mean_le (fun t => mul_le_mul_left (mask_nonneg R t).1 (h.inv_r_le_a t))
    have hinv1 : ∀ t, (x.r t)⁻¹ ≤ 1 := fun t => le_of_mul_le (h.r_pos t) (by
      rw [mul_inv_cancel (h.r_pos t)]; exact le_trans (h.one_le_r t) (le_of_eq (by ring)))
    have hvρ : x.mean (fun t => mask R t * (x.r t)⁻¹) ≤ x.mean (mask R) :=
      h.mean_le (fun t => le_trans (mul_le_mul_left (mask_nonneg R t).1 (hinv1 t)) (le_of_eq (by ring)))
    have hvN : x.mean (fun t => (1 - mask R t) * (x.r t)⁻¹) ≤ 1 - x.mean (mask R) := by
      refine le_trans (h.mean_le (fun t => mul_le_mul_left (mask_nonneg R t).2 (hinv1 t))) (le_of_eq ?_)
      refine (x.mean_congr (g := fun t => 1 - mask R t) (fun t => by ring)).trans ((x.mean_sub (fun _ => 1) (mask R)).trans ?_)
      rw [h.mean_const]
    have hU0 : 0 ≤ x.up s₀ := h.mean_nonneg (fun t => nonneg_mul (hf t).1 (le_of_lt (h.r_pos t)))
    have hm0 : 0 ≤ x.mean s₀ := h.mean_nonneg (fun t => (hf t).1)
    have kv := hy.attackValue_mul hf
    have pz := hy.z_pos hf
    rw [eU, eL, em] at kv
    rw [eU, eL] at pz
    -- V' stands for D·lo of the repaired cell
    have hden : 0 < x.up s₀ + (x.lo s₀ - x.mean (fun t => mask R t * (x.r t)⁻¹) + x.mean (fun t => mask R t * x.a t)) :=
      unscale_pos hD hDi pz
    have kv2 := unscale hDi kv
    cases le_total (x.mean (x.tilt R)) 1 with
    | inl c =>
      -- weights outside R grow: the same set does at least as well before
      refine ⟨s₀, hf, le_trans H.2.2 ?_⟩
      have k := h.attackValue_mul hf
      have p := h.z_pos hf
      have hφ : 1 ≤ (x.mean (x.tilt R))⁻¹ := le_of_mul_le hD (by rw [hDi]; exact le_trans (le_of_eq (by ring)) c)
      exact grow_step hU0 hm0 hφ hYv p hden k kv2
    | inr c =>
      -- weights outside R shrink by D: raise the fraction 1/D of the same set before
      have hφ0 : 0 ≤ (x.mean (x.tilt R))⁻¹ := inv_nonneg hD
      have hφ1 : (x.mean (x.tilt R))⁻¹ ≤ 1 := le_of_mul_le hD (by rw [hDi]; exact le_trans c (le_of_eq (by ring)))
      have hf' : IsFrac (fun t => (x.mean (x.tilt R))⁻¹ * s₀ t) := fun t =>
        ⟨nonneg_mul hφ0 (hf t).1, nonneg_cert (add_nonneg (sub_nonneg hφ1) (nonneg_mul hφ0 (hf t).2)) (by ring)⟩
      refine ⟨_, hf', le_trans H.2.2 ?_⟩
      have k := h.attackValue_mul hf'
      have p := h.z_pos hf'
      have e1 : x.up (fun t => (x.mean (x.tilt R))⁻¹ * s₀ t) = (x.mean (x.tilt R))⁻¹ * x.up s₀ :=
        (x.mean_congr (fun t => by ring)).trans (x.mean_mul _ (fun t => s₀ t * x.r t))
      have e2 : x.mean (fun t => (x.mean (x.tilt R))⁻¹ * s₀ t) = (x.mean (x.tilt R))⁻¹ * x.mean s₀ := x.mean_mul _ _
      -- lo of the new set: v - φ Σ w s/r, and lo s₀ = v - Σ w s/r
      have e3 : x.lo (fun t => (x.mean (x.tilt R))⁻¹ * s₀ t) = (1 - (x.mean (x.tilt R))⁻¹) * (x.mean (fun t => (1 - mask R t) * (x.r t)⁻¹) + x.mean (fun t => mask R t * (x.r t)⁻¹)) + (x.mean (x.tilt R))⁻¹ * x.lo s₀ := by
        rw [← mean_mask R (fun t => (x.r t)⁻¹)]
        refine (x.mean_congr (fun t => ?_)).trans (x.mean_lin (1 - (x.mean (x.tilt R))⁻¹) (x.mean (x.tilt R))⁻¹ (fun t => (x.r t)⁻¹) (fun t => (1 - s₀ t) * (x.r t)⁻¹))
        ring
      rw [e1, e2, e3] at k
      rw [e1, e3] at p
      rw [hDe] at c hDi hD hφ0 p k kv2 ⊢
      exact shrink_step hU0 hφ0 hDi c hvN hvρ p hden k kv2
end Cell
end WitCert
