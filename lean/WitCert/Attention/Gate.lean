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

Code: `witcert_core.policy.gates.Certified`.
`python: gate(cell, tau).rounds <= gate(cell, tau).blocks and gate(cell, tau).accepted` -/
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

Code: `witcert_core.policy.gates.Certified`, `witcert_core.policy.gates.Combined`.
`python: gate(cell, tau).final.TV <= gate(cell, tau).tau` -/
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
theorem Sound.tilt_nonneg (t : ι) : 0 ≤ x.tilt R t := nonneg_of_mul (h.r_pos t) (le_trans zero_le_one (h.tilt_lower R t))
theorem Sound.tilt_pos : 0 < x.mean (x.tilt R) := by
  have k := h.one_le_mean_mul h.r_pos (h.tilt_lower R) h.A_pos
  refine lt_of_le_of_ne (h.mean_nonneg (h.tilt_nonneg R)) (fun e => ?_)
  rw [e] at k
  exact zero_lt_one (le_trans k (le_of_eq (show x.mean x.r * 0 = 0 from by ring)))

/-- **A repaired cell is sound again**, with the new weights.

Code: `witcert_core.policy.gates.Certified` (recompute `p̃` and `c`, then evaluate again).
`python: sum(repaired.w) == 1 and all(1 <= x * v and v <= x for x, v in zip(repaired.r, repaired.a))` -/
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

Code: `witcert_core.meter.tv.total_variation` (`p` does not depend on what was repaired).
`python: repaired.p == cell.p` -/
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

Code: `witcert_core.policy.gates.Certified` (all radii 0).
`python: all_repaired.TV == 0 and all_repaired.code("meter") == 0` -/
theorem Sound.repair_all (hR : ∀ t, R t = true) : (x.repair R).TV = 0 :=
  (h.repair_sound R).tv_common_shift 1 (fun t => by
    show cond (R t) 1 (x.a t) = 1
    rw [hR t]; rfl)

/-- **tanh never rises under repair**: a bound on the radii stays one.

Code: `witcert_core.meter.bounds.tanh.bound`.
`python: repaired.TV <= (R - 1) / (R + 1) and repaired.code("tanh") <= code("tanh")` -/
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

Code: `witcert_core.meter.bounds.eform.bound`.
`python: A > 2 or repaired.A <= A` -/
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
end Cell
end WitCert
