import WitCert.Probability.Law
import WitCert.Probability.Dither
/-!
# Weights that do not depend on the dither

The union over the `S` tokens of a cell costs tier D `ln(2S/δ)` in place of `ln(2/δ)`. Weights that do not depend on the row avoid
it in two ways: as shares of the failure probability (`weighted_union`), or inside the expectation (`weighted_markov`), since
`E Σ p e^{n|ε|} = Σ p E e^{n|ε|}` whatever the dependence between tokens. From `Σ p e^{n|ε|} ≤ K`, `p` the *exact* weights, the odds of
every set move by a factor that depends on its exact mass alone (`odds_moved`): no weight need be at hand.
-/
set_option synthInstance.maxSize 4000
universe u v w
namespace WitCert
variable {α : Type u} [OrderedField α] {ι : Type v} {Ω : Type w}

/-- **A union bound with shares**: token `t` may fail with probability `δ p_t`; for weights that are fixed beforehand and sum to at
most 1, some token fails with probability at most `δ`.

Code: `witcert_core.budget.Budget`.
`python: dither.prob(lambda o: any(ev(o) for ev in dither.events)) <= max(dither.prob(ev) / p for ev, p in zip(dither.events, (Fraction(1, 3), Fraction(2, 3))))` -/
theorem weighted_union (L : Law α Ω) (ev : ι → Ω → Bool) (l : List ι) {p : ι → α} {δ : α} (hδ : 0 ≤ δ) (hp : sum p l ≤ 1)
    (h : ∀ t, L.P (ev t) ≤ δ * p t) : L.P (anyOf ev l) ≤ δ := by
  refine le_trans (L.union_budget ev (fun t => δ * p t) l h) ?_
  rw [sum_mul]
  exact le_trans (mul_le_mul_left hδ hp) (le_of_eq (by ring))

theorem Law.sum_E (L : Law α Ω) (f : ι → Ω → α) (l : List ι) : L.E (fun o => sum (fun t => f t o) l) = sum (fun t => L.E (f t)) l := by
  induction l with
  | nil => exact L.const 0
  | cons t l ih =>
    show L.E (fun o => f t o + sum (fun t => f t o) l) = L.E (f t) + sum (fun t => L.E (f t)) l
    rw [L.add, ih]

/-- **One event for all tokens**: if each `E X_t ≤ δ K` for `X_t ≥ 0` and the weights are fixed and sum to 1, then
`P(Σ p X > K) ≤ δ`, whatever the dependence between tokens.

Code: `witcert_core.radii.radius_dither`.
`python: dither.prob(lambda o: (dither.err(0, o) ** 2 + dither.err(1, o) ** 2) / 2 > kappa) <= max(dither.space.mean(lambda o: dither.err(t, o) ** 2) for t in (0, 1)) / kappa` -/
theorem weighted_markov (L : Law α Ω) (X : ι → Ω → α) (l : List ι) {p : ι → α} {δ K : α} (hK : 0 < K) (hp0 : ∀ t, 0 ≤ p t)
    (hp : sum p l = 1) (hX : ∀ t o, 0 ≤ X t o) (h : ∀ t, L.E (X t) ≤ δ * K) :
    L.P (fun o => Law.gtB K (sum (fun t => p t * X t o) l)) ≤ δ := by
  have h1 : L.E (fun o => sum (fun t => p t * X t o) l) ≤ δ * K := by
    rw [L.sum_E (fun t o => p t * X t o)]
    refine le_trans (sum_le l (fun t => le_trans (le_of_eq (L.smul (p t) (X t))) (mul_le_mul_left (hp0 t) (h t)))) (le_of_eq ?_)
    rw [sum_congr l (g := fun t => δ * K * p t) (fun t => by ring), sum_mul, hp]
    ring
  have h2 : K * L.P (fun o => Law.gtB K (sum (fun t => p t * X t o) l)) ≤ L.E (fun o => sum (fun t => p t * X t o) l) := by
    refine le_trans (le_of_eq (L.smul K _).symm) (L.mono (fun o => ?_))
    show K * Law.ind (Law.gtB K (sum (fun t => p t * X t o) l)) ≤ sum (fun t => p t * X t o) l
    cases Law.gt_cases K (sum (fun t => p t * X t o) l) with
    | inl k =>
      rw [k.2]
      exact le_trans (le_of_eq (show K * (0 : α) = 0 from by ring)) (sum_nonneg l (fun t => nonneg_mul (hp0 t) (hX t o)))
    | inr k =>
      rw [k.2]
      exact le_trans (le_of_eq (show K * (1 : α) = K from by ring)) (le_of_lt k.1)
  exact le_of_mul_le hK (le_trans h2 (le_trans h1 (le_of_eq (by ring))))

/-! ### The power mean -/

theorem pow_nonneg {m : α} (hm : 0 ≤ m) (n : Nat) : 0 ≤ pow m n := by
  induction n with
  | zero => exact zero_le_one
  | succ n ih => exact nonneg_mul hm ih
theorem mul_pow (x y : α) (n : Nat) : pow (x * y) n = pow x n * pow y n := by
  induction n with
  | zero => show (1 : α) = 1 * 1; ring
  | succ n ih => show x * y * pow (x * y) n = x * pow x n * (y * pow y n); rw [ih]; ring
/-- The slope `n m^{n-1}` of `m^n`. -/
def slope (m : α) : Nat → α
  | .zero => 0
  | .succ n => pow m n + m * slope m n
theorem slope_nonneg {m : α} (hm : 0 ≤ m) (n : Nat) : 0 ≤ slope m n := by
  induction n with
  | zero => exact le_refl 0
  | succ n ih => exact add_nonneg (pow_nonneg hm n) (nonneg_mul hm ih)
/-- `x^n` lies above its tangent at `m`. -/
theorem tangent_pow {x m : α} (hx : 0 ≤ x) (hm : 0 ≤ m) (n : Nat) : pow m n + slope m n * (x - m) ≤ pow x n := by
  induction n with
  | zero => exact le_of_eq (by show (1 : α) + 0 * (x - m) = 1; ring)
  | succ n ih =>
    show m * pow m n + (pow m n + m * slope m n) * (x - m) ≤ x * pow x n
    exact le_cert (add_nonneg (nonneg_mul hx (sub_nonneg ih)) (nonneg_mul (slope_nonneg hm n) (sq_nonneg (x - m)))) (by ring)
/-- **Power mean**: for weights `v ≥ 0` of mass `V` and `V m = Σ v x`, `V mⁿ ≤ Σ v xⁿ`.

Code: `witcert_core.tv.total_variation_of_errors`.
`python: sum(x * y for x, y in zip(w, r)) ** n <= sum(x * y ** n for x, y in zip(w, r))` -/
theorem power_mean {v x : ι → α} {V m : α} (l : List ι) (hv : ∀ t, 0 ≤ v t) (hx : ∀ t, 0 ≤ x t) (hm : 0 ≤ m) (hV : sum v l = V)
    (e : V * m = sum (fun t => v t * x t) l) (n : Nat) : V * pow m n ≤ sum (fun t => v t * pow (x t) n) l := by
  have h := sum_le l (fun t => mul_le_mul_left (hv t) (tangent_pow (hx t) hm n))
  have s : sum (fun t => v t * (pow m n + slope m n * (x t - m))) l
      = (pow m n + -(slope m n * m)) * V + slope m n * sum (fun t => v t * x t) l := by
    rw [← hV, ← sum_lin2]
    exact sum_congr l (fun t => by ring)
  rw [s, ← e] at h
  exact le_trans (le_of_eq (by ring)) h

/-- **The odds of a set move by its exact mass alone.** With `b = e^ε`, `x = e^{|ε|}` and `Σ p xⁿ ≤ K` for the exact weights `p`, a set
of exact mass `a` (tokens divisible: `s ∈ [0, 1]`) has a compressed mass of at most `aR/(aR + 1 - a)`, `Rⁿ ≤ K²/(4a(1 - a))`: the most
that this exceeds `a` by, over all `a`, bounds the TV, and no weight is needed.

Code: `witcert_core.tv.total_variation_of_errors` (what it bounds; no radius relies on it yet).
`python: all(odds_gain(s) ** n * 4 * mass_p(s) * (1 - mass_p(s)) <= sum(p * max(x, 1 / x) ** n for p, x in zip(cell.p, cell.a)) ** 2 for s in cell.subsets if 0 < mass_p(s) < 1)` -/
theorem odds_moved {p s b x : ι → α} {l : List ι} {a K : α} (hp0 : ∀ t, 0 ≤ p t) (hp : sum p l = 1) (hs0 : ∀ t, 0 ≤ s t) (hs1 : ∀ t, s t ≤ 1)
    (hx : ∀ t, 0 ≤ x t) (hb0 : ∀ t, 0 ≤ b t) (hb : ∀ t, b t ≤ x t) (hxb : ∀ t, 1 ≤ x t * b t) (ha : sum (fun t => p t * s t) l = a) (h0 : 0 < a) (h1 : a < 1)
    (n : Nat) (hK : sum (fun t => p t * pow (x t) n) l ≤ K) :
    ∃ R, sum (fun t => p t * s t * b t) l * (a * R + (1 - a)) ≤ a * R * sum (fun t => p t * b t) l ∧
      pow R n * (4 * (a * (1 - a))) ≤ K * K := by
  have c0 := pos_of_sub h1
  have v0 : ∀ t, 0 ≤ p t * s t := fun t => nonneg_mul (hp0 t) (hs0 t)
  have w0 : ∀ t, 0 ≤ p t * (1 - s t) := fun t => nonneg_mul (hp0 t) (sub_nonneg (hs1 t))
  have hc : sum (fun t => p t * (1 - s t)) l = 1 - a := by
    rw [sum_congr l (g := fun t => p t - p t * s t) (fun t => by ring), sum_sub, hp, ha]
  have X0 := sum_nonneg l (fun t => nonneg_mul (v0 t) (hx t))
  have Y0 := sum_nonneg l (fun t => nonneg_mul (w0 t) (hx t))
  have m0 : 0 ≤ sum (fun t => p t * s t * x t) l / a := div_nonneg X0 h0
  have k0 : 0 ≤ sum (fun t => p t * (1 - s t) * x t) l / (1 - a) := div_nonneg Y0 c0
  have pm := power_mean l v0 hx m0 ha (mul_div_cancel h0) n
  have pk := power_mean l w0 hx k0 hc (mul_div_cancel c0) n
  have both : sum (fun t => p t * s t * pow (x t) n) l + sum (fun t => p t * (1 - s t) * pow (x t) n) l ≤ K := by
    rw [← sum_add]
    exact le_trans (le_of_eq (sum_congr l (fun t => by ring))) hK
  refine ⟨sum (fun t => p t * s t * x t) l / a * (sum (fun t => p t * (1 - s t) * x t) l / (1 - a)), ?_, ?_⟩
  · have u1 : sum (fun t => p t * s t * b t) l ≤ sum (fun t => p t * s t * x t) l := sum_le l (fun t => mul_le_mul_left (v0 t) (hb t))
    have u2 := sum_sq_le_of_one_le_mul w0 hb0 hx hxb l
    rw [hc] at u2
    have b0 := sum_nonneg l (fun t => nonneg_mul (w0 t) (hb0 t))
    have u3 : 1 - a ≤ sum (fun t => p t * (1 - s t) * x t) l / (1 - a) * sum (fun t => p t * (1 - s t) * b t) l :=
      le_of_mul_le c0 (le_trans u2 (le_of_eq (eq_lin (mul_inv_cancel c0)
        (-(sum (fun t => p t * (1 - s t) * b t) l * sum (fun t => p t * (1 - s t) * x t) l)) (by ring))))
    have b1 := sum_nonneg l (fun t => nonneg_mul (v0 t) (hb0 t))
    have u4 := mul_le_mul b1 (le_trans (le_of_lt c0) u3) u1 u3
    have e1 : sum (fun t => p t * b t) l = sum (fun t => p t * s t * b t) l + sum (fun t => p t * (1 - s t) * b t) l := by
      rw [← sum_add]
      exact sum_congr l (fun t => by ring)
    rw [e1]
    refine le_cert (sub_nonneg u4) ?_
    exact eq_lin (mul_inv_cancel h0) (sum (fun t => p t * s t * x t) l * (sum (fun t => p t * (1 - s t) * x t) l / (1 - a)
      * sum (fun t => p t * (1 - s t) * b t) l)) (by ring)
  · rw [mul_pow]
    have q1 := mul_le_mul (nonneg_mul (le_of_lt h0) (pow_nonneg m0 n)) (le_trans (nonneg_mul (le_of_lt c0) (pow_nonneg k0 n)) pk) pm pk
    have q0 := add_nonneg (sum_nonneg l (fun t => nonneg_mul (v0 t) (pow_nonneg (hx t) n))) (sum_nonneg l (fun t => nonneg_mul (w0 t) (pow_nonneg (hx t) n)))
    have q2 := mul_le_mul q0 (le_trans q0 both) both both
    have four : (0 : α) ≤ 4 := nonneg_cert (add_nonneg zero_le_two zero_le_two) (by ring)
    exact le_cert (add_nonneg (add_nonneg (nonneg_mul four (sub_nonneg q1)) (sub_nonneg q2))
      (sq_nonneg (sum (fun t => p t * s t * pow (x t) n) l - sum (fun t => p t * (1 - s t) * pow (x t) n) l))) (by ring)
end WitCert
