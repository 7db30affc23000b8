import WitCert.Algebra.Sum
/-!
# An ordered field with an exponential

Three laws are assumed and nothing else. For the real exponential they are, in Mathlib,
* `exp_add`: `Real.exp_add`,
* `one_add_le_exp`: `Real.add_one_le_exp` (up to the order of the summands),
* `cosh_le`: `Real.cosh_le_exp_half_sq` (`cosh x ≤ exp (x²/2)`, doubled).
-/
set_option synthInstance.maxSize 4000
universe u
namespace WitCert

/-- An ordered field with `exp`: `exp (x + y) = exp x · exp y`, `1 + x ≤ exp x`, `exp x + exp (-x) ≤ 2 exp (x²/2)`. -/
class ExpField (α : Type u) extends OrderedField α where
  exp : α → α
  exp_add : ∀ x y : α, exp (x + y) = exp x * exp y
  one_add_le_exp : ∀ x : α, 1 + x ≤ exp x
  cosh_le : ∀ x : α, exp x + exp (-x) ≤ 2 * exp (2⁻¹ * (x * x))

export ExpField (exp exp_add one_add_le_exp cosh_le)
variable {α : Type u} [ExpField α]

theorem exp_nonneg (x : α) : 0 ≤ exp x := by
  have h := sq_nonneg (exp (2⁻¹ * x))
  rw [← exp_add, half_add] at h
  exact h
theorem exp_zero : exp (0 : α) = 1 := by
  have h1 : (1 : α) ≤ exp 0 := le_trans (le_of_eq (by ring)) (one_add_le_exp 0)
  have h2 : exp (0 : α) * exp 0 = exp 0 := by
    rw [← exp_add, show (0 : α) + 0 = 0 from by ring]
  exact le_antisymm (le_of_mul_le (lt_of_one_le h1) (le_of_eq (by rw [h2]; ring))) h1
theorem exp_mul_neg (x : α) : exp x * exp (-x) = 1 := by
  rw [← exp_add, show x + -x = 0 from by ring, exp_zero]
theorem exp_pos (x : α) : 0 < exp x := lt_of_le_of_ne (exp_nonneg x) (fun e => by
  have h := exp_mul_neg x
  rw [e, show 0 * exp (-x) = 0 from by ring] at h
  exact zero_ne_one h)
theorem exp_mono {x y : α} (h : x ≤ y) : exp x ≤ exp y := by
  have h1 : exp x * (1 + (y - x)) ≤ exp x * exp (y - x) := mul_le_mul_left (exp_nonneg x) (one_add_le_exp _)
  rw [← exp_add, show x + (y - x) = y from by ring] at h1
  exact le_trans (le_cert (nonneg_mul (exp_nonneg x) (sub_nonneg h)) (by ring)) h1
theorem one_le_exp {x : α} (h : 0 ≤ x) : 1 ≤ exp x := by
  have k := exp_mono h
  rw [exp_zero] at k
  exact k

/-! ### The hyperbolic tangent, for the logit softcap -/

/-- `tanh x = (e^{2x} - 1)/(e^{2x} + 1)`. -/
def tanh (x : α) : α := (exp (2 * x) - 1) / (exp (2 * x) + 1)
theorem tanh_den (x : α) : 0 < exp (2 * x) + 1 := add_pos (exp_pos _) zero_le_one
theorem tanh_mul (x : α) : tanh x * (exp (2 * x) + 1) = exp (2 * x) - 1 := div_mul_cancel (tanh_den x)
theorem exp_two (x : α) : exp (2 * x) = exp x * exp x := by
  rw [← exp_add]; exact congrArg exp (by ring)
/-- `tanh 2x ≤ 2 tanh x` for `x ≥ 0`. -/
theorem tanh_double {x : α} (h : 0 ≤ x) : tanh (2 * x) ≤ 2 * tanh x := by
  have e1 := tanh_mul x
  have h1 := one_le_exp (nonneg_mul zero_le_two h)
  have e0 : exp (2 * (2 * x)) = exp (2 * x) * exp (2 * x) := exp_two (2 * x)
  refine div_le (tanh_den (2 * x)) ?_
  rw [e0]
  refine le_of_mul_le (tanh_den x) ?_
  have k : 0 ≤ (exp (2 * x) - 1) * ((exp (2 * x) - 1) * (exp (2 * x) - 1)) := nonneg_mul (sub_nonneg h1) (sq_nonneg _)
  exact le_cert k (eq_lin e1 (2 * (exp (2 * x) * exp (2 * x) + 1)) (by ring))
/-- `tanh x ≤ x + 2x² e^{2x}` for `x ≥ 0`: the crude bound near zero. -/
theorem tanh_crude {x : α} (h : 0 ≤ x) : tanh x - x ≤ 2 * (x * x) * exp (2 * x) := by
  -- e^{2x} - 1 ≤ 2x e^{2x}, from 1 - 2x ≤ e^{-2x}
  have h1 : exp (2 * x) * (1 - 2 * x) ≤ 1 := by
    have k := mul_le_mul_left (exp_nonneg (2 * x)) (one_add_le_exp (-(2 * x)))
    rw [exp_mul_neg] at k
    exact le_trans (le_of_eq (by ring)) k
  have e1 := tanh_mul x
  have g1 := sub_nonneg (one_le_exp (nonneg_mul zero_le_two h))
  refine le_of_mul_le (tanh_den x) ?_
  have k1 : 0 ≤ x * ((exp (2 * x) + 1) * (1 - exp (2 * x) * (1 - 2 * x))) :=
    nonneg_mul h (nonneg_mul (le_of_lt (tanh_den x)) (sub_nonneg h1))
  have k2 : 0 ≤ x * (exp (2 * x) * (exp (2 * x) - 1)) := nonneg_mul h (nonneg_mul (exp_nonneg _) g1)
  exact le_cert (add_nonneg (sub_nonneg h1) (add_nonneg k1 k2)) (eq_lin e1 (-1) (by ring))

/-- Repeated halving. -/
theorem tanh_halving (X : α) (n : Nat) : ∀ x : α, 0 ≤ x → x ≤ X → (1 + ofNat n) * (tanh x - x) ≤ 2 * (x * x) * exp (2 * X) := by
  induction n with
  | zero =>
    intro x h hX
    have k : 0 ≤ 2 * (x * x) * (exp (2 * X) - exp (2 * x)) :=
      nonneg_mul (nonneg_mul zero_le_two (sq_nonneg x)) (sub_nonneg (exp_mono (mul_le_mul_left zero_le_two hX)))
    exact le_cert (add_nonneg (sub_nonneg (tanh_crude h)) k) (by show _ - (1 + 0) * (tanh x - x) = _; ring)
  | succ n ih =>
    intro x h hX
    have hx : 0 ≤ 2⁻¹ * x := nonneg_mul half_nonneg h
    have e2 : 2 * (2⁻¹ * x) = x := eq_lin two_half x (by ring)
    have i := ih (2⁻¹ * x) hx (le_trans (le_cert hx (eq_lin two_half (-x) (by ring))) hX)
    have d := tanh_double hx
    rw [e2] at d
    rw [ofNat_succ]
    cases le_total (tanh x) x with
    | inl c =>
      have k : 0 ≤ (1 + (ofNat n + 1)) * (x - tanh x) := nonneg_mul (add_nonneg zero_le_one (add_nonneg (ofNat_nonneg n) zero_le_one)) (sub_nonneg c)
      exact le_cert (add_nonneg k (nonneg_mul (nonneg_mul zero_le_two (sq_nonneg x)) (exp_nonneg (2 * X)))) (by
        show _ - (1 + (ofNat n + 1)) * (tanh x - x) = _
        ring)
    | inr c =>
      -- (n+2)(t - x) ≤ 2(n+1)(t - x) ≤ 4(n+1)(t(x/2) - x/2) ≤ 8 (x/2)² e^{2X}
      have k1 : 0 ≤ ofNat n * (tanh x - x) := nonneg_mul (ofNat_nonneg n) (sub_nonneg c)
      have k2 : 0 ≤ 2 * (1 + ofNat n) * (2 * tanh (2⁻¹ * x) - tanh x) :=
        nonneg_mul (nonneg_mul zero_le_two (add_nonneg zero_le_one (ofNat_nonneg n))) (sub_nonneg d)
      have k4 : 0 ≤ 4 * (2 * (2⁻¹ * x * (2⁻¹ * x)) * exp (2 * X) - (1 + ofNat n) * (tanh (2⁻¹ * x) - 2⁻¹ * x)) :=
        nonneg_mul (nonneg_cert (add_nonneg zero_le_two zero_le_two) (by ring)) (sub_nonneg i)
      refine le_cert (add_nonneg (add_nonneg k1 k2) k4) ?_
      show _ - (1 + (ofNat n + 1)) * (tanh x - x) = _
      exact eq_lin two_half (-(2 * (1 + ofNat n) * x) - 2 * (x * x) * exp (2 * X) * (2 * 2⁻¹ + 1)) (by ring)
/-- `tanh x ≤ x` for `x ≥ 0` in an Archimedean field. -/
theorem tanh_le (arch : ∀ y : α, ∃ n, y ≤ ofNat n) {x : α} (h : 0 ≤ x) : tanh x ≤ x := by
  cases le_or_lt (tanh x) x with
  | inl c => exact c
  | inr c =>
    have hd := pos_of_sub c
    cases arch (2 * (x * x) * exp (2 * x) / (tanh x - x)) with
    | intro n hn =>
      have k := tanh_halving x n x h (le_refl x)
      have k2 := mul_le_mul_left (le_of_lt hd) hn
      rw [mul_div_cancel hd] at k2
      exact absurd (le_trans k k2) (fun e => hd (le_cert (sub_nonneg e) (by ring)))
/-- **The tanh map is 1-Lipschitz** (Archimedean fields): `|tanh x - tanh y| ≤ |x - y|`, so the softcap keeps radii. -/
theorem tanh_lipschitz (arch : ∀ y : α, ∃ n, y ≤ ofNat n) (x y : α) : abs (tanh x - tanh y) ≤ abs (x - y) := by
  -- for y ≤ x: tanh x - tanh y ≤ 2 tanh((x-y)/2) ≤ x - y
  have key : ∀ x y : α, y ≤ x → tanh x - tanh y ≤ x - y ∧ 0 ≤ tanh x - tanh y := fun x y hxy => by
    have hd : 0 ≤ 2⁻¹ * (x - y) := nonneg_mul half_nonneg (sub_nonneg hxy)
    have e2 : 2 * (2⁻¹ * (x - y)) = x - y := eq_lin two_half (x - y) (by ring)
    have ht := tanh_le arch hd
    have et := tanh_mul (2⁻¹ * (x - y))
    rw [e2] at et
    have hE : exp (2 * x) = exp (x - y) * exp (x - y) * exp (2 * y) := by
      rw [← exp_add, ← exp_add]; exact congrArg exp (by ring)
    have hg := one_le_exp (sub_nonneg hxy)
    have e1 := tanh_mul x
    have e3 := tanh_mul y
    have m1 : tanh x - tanh y ≤ 2 * tanh (2⁻¹ * (x - y)) := by
      refine le_of_mul_le (mul_pos (tanh_den x) (mul_pos (tanh_den y) (add_pos (exp_pos (x - y)) zero_le_one))) ?_
      have sq : 0 ≤ (exp (x - y) - 1) * ((exp (x - y) * exp (2 * y) - 1) * (exp (x - y) * exp (2 * y) - 1)) :=
        nonneg_mul (sub_nonneg hg) (sq_nonneg _)
      refine le_cert (nonneg_mul zero_le_two sq) ?_
      generalize tanh x = tx at e1
      generalize tanh y = ty at e3
      generalize tanh (2⁻¹ * (x - y)) = td at et
      generalize exp (x - y) = g at et hE
      generalize exp (2 * y) = F at hE e3
      rw [hE] at e1
      rw [hE]
      exact eq_lin3 e1 e3 et (-((F + 1) * (g + 1))) ((g * g * F + 1) * (g + 1)) (2 * ((g * g * F + 1) * (F + 1))) (by ring)
    refine ⟨le_trans m1 (le_trans (mul_le_mul_left zero_le_two ht) (le_of_eq e2)), ?_⟩
    refine nonneg_of_mul (mul_pos (tanh_den x) (tanh_den y)) ?_
    have m := exp_mono (show 2 * y ≤ 2 * x from mul_le_mul_left zero_le_two hxy)
    exact nonneg_cert (nonneg_mul zero_le_two (sub_nonneg m)) (eq_lin2 e1 e3 (exp (2 * y) + 1) (-(exp (2 * x) + 1)) (by ring))
  cases le_total y x with
  | inl c =>
    have k := key x y c
    exact abs_le (le_trans k.1 (le_abs _)) (le_trans (le_cert k.2 (by ring)) (abs_nonneg (x - y)))
  | inr c =>
    have k := key y x c
    refine abs_le (le_trans (le_cert k.2 (by ring)) (abs_nonneg (x - y))) (le_trans (le_trans (le_of_eq (by ring)) k.1) (le_trans (le_of_eq (by ring)) (neg_le_abs (x - y))))
end WitCert
