import WitCert.Algebra.Exp
/-!
# Laws of probability

A law is a positive, linear, normalised functional on functions: enough for finite probability (`Law.count` is
counting) and for everything a finite union bound or a Chernoff bound needs. Events are boolean.
-/
set_option synthInstance.maxSize 4000
universe u v w
namespace WitCert

/-- A law on `Ω`: expectation as a positive, linear, normalised functional. -/
structure Law (α : Type u) [OrderedField α] (Ω : Type v) where
  E : (Ω → α) → α
  mono : ∀ {f g : Ω → α}, (∀ o, f o ≤ g o) → E f ≤ E g
  lin : ∀ (c d : α) (f g : Ω → α), E (fun o => c * f o + d * g o) = c * E f + d * E g
  one : E (fun _ => 1) = 1

/-- Some event of a list happens. -/
def anyOf {Ω : Type v} {ι : Type w} (ev : ι → Ω → Bool) : List ι → Ω → Bool
  | .nil, _ => false
  | .cons i l, o => or (ev i o) (anyOf ev l o)

namespace Law
section
variable {α : Type u} [OrderedField α] {Ω : Type v} {Ψ : Type w} (L : Law α Ω)
theorem congr {f g : Ω → α} (h : ∀ o, f o = g o) : L.E f = L.E g :=
  le_antisymm (L.mono (fun o => le_of_eq (h o))) (L.mono (fun o => le_of_eq (h o).symm))
theorem smul (c : α) (f : Ω → α) : L.E (fun o => c * f o) = c * L.E f :=
  (L.congr (g := fun o => c * f o + 0 * f o) (fun _ => by ring)).trans ((L.lin c 0 f f).trans (by ring))
theorem add (f g : Ω → α) : L.E (fun o => f o + g o) = L.E f + L.E g :=
  (L.congr (g := fun o => 1 * f o + 1 * g o) (fun _ => by ring)).trans ((L.lin 1 1 f g).trans (by ring))
theorem const (c : α) : L.E (fun _ => c) = c :=
  (L.congr (g := fun _ => c * 1) (fun _ => by ring)).trans ((L.smul c (fun _ => 1)).trans (by rw [L.one]; ring))
theorem affine (c d : α) (f : Ω → α) : L.E (fun o => c * f o + d) = c * L.E f + d := by
  rw [L.add, L.smul, L.const]

/-! ### Constructions -/
/-- Point mass. -/
def dirac (o : Ω) : Law α Ω := ⟨fun f => f o, fun h => h o, fun _ _ _ _ => rfl, rfl⟩
/-- Image under `X`. -/
def map (X : Ω → Ψ) : Law α Ψ :=
  ⟨fun f => L.E (fun o => f (X o)), fun h => L.mono (fun o => h (X o)), fun c d _ _ => L.lin c d _ _, L.one⟩
/-- Fair mixture. -/
def mix (L K : Law α Ω) : Law α Ω :=
  ⟨fun f => 2⁻¹ * (L.E f + K.E f),
   fun h => mul_le_mul_left half_nonneg (add_le_add (L.mono h) (K.mono h)),
   fun c d f g => by
     show 2⁻¹ * (L.E _ + K.E _) = c * (2⁻¹ * (L.E f + K.E f)) + d * (2⁻¹ * (L.E g + K.E g))
     rw [L.lin, K.lin]; ring,
   by
     show 2⁻¹ * (L.E _ + K.E _) = 1
     rw [L.one, K.one]; exact eq_lin two_half 1 (by ring)⟩
/-- Independent pair. -/
def pair (K : Law α Ψ) : Law α (Prod Ω Ψ) :=
  ⟨fun f => L.E (fun o => K.E (fun p => f ⟨o, p⟩)), fun h => L.mono (fun o => K.mono (fun p => h ⟨o, p⟩)),
   fun c d _ _ => (L.congr (fun _ => K.lin c d _ _)).trans (L.lin c d _ _),
   (L.congr (fun _ => K.one)).trans L.one⟩
theorem length_pos (i : Ω) (l : List Ω) : (0 : α) < sum (fun _ => 1) (.cons i l) :=
  lt_of_lt_of_le zero_lt_one (le_cert (sum_nonneg l (fun _ => zero_le_one)) (by show (1 : α) + sum (fun _ => 1) l - 1 = _; ring))
/-- **Counting** on a nonempty list: the mean over its elements. -/
def count (i : Ω) (l : List Ω) : Law α Ω :=
  ⟨fun f => sum f (.cons i l) / sum (fun _ => 1) (.cons i l),
   fun h => le_div (length_pos i l) (le_trans (le_of_eq (div_mul_cancel (length_pos i l))) (sum_le _ h)),
   fun c d f g => by
     show sum (fun o => c * f o + d * g o) (.cons i l) / _ = c * (_ / _) + d * (_ / _)
     rw [sum_lin2]; ring,
   (div_eq _ _).trans (mul_inv_cancel (length_pos i l))⟩

/-! ### Events -/
/-- Indicator. -/
def ind (b : Bool) : α := cond b 1 0
theorem ind_nonneg (b : Bool) : (0 : α) ≤ ind b := by
  cases b with
  | true => exact zero_le_one
  | false => exact le_refl 0
/-- Probability of an event. -/
def P (ev : Ω → Bool) : α := L.E (fun o => ind (ev o))
/-- An event contained in another is not more likely. -/
theorem P_mono {ev ev' : Ω → Bool} (h : ∀ o, ev o = true → ev' o = true) : L.P ev ≤ L.P ev' := L.mono (fun o => by
  have k := h o
  revert k
  cases ev o with
  | false => exact fun _ => ind_nonneg (ev' o)
  | true => exact fun k => by rw [k rfl]; exact le_refl _)
theorem ind_or (a b : Bool) : (ind (or a b) : α) ≤ ind a + ind b := by
  cases a with
  | true => exact le_cert (ind_nonneg b) (by show (1 : α) + ind b - 1 = ind b; ring)
  | false => exact le_of_eq (by show ind b = (0 : α) + ind b; ring)

/-- **Union bound**: `P(some event) ≤ Σ P(event)`, with no independence at all.

Code: `witcert_core.meter.budget.Budget`.
`python: dither.prob(lambda o: any(ev(o) for ev in dither.events)) <= sum(dither.prob(ev) for ev in dither.events)` -/
theorem union_bound {ι : Type w} (ev : ι → Ω → Bool) (l : List ι) : L.P (anyOf ev l) ≤ sum (fun i => L.P (ev i)) l := by
  induction l with
  | nil => exact le_of_eq (L.const 0)
  | cons i l ih =>
    refine le_trans (L.mono (fun o => ind_or _ _)) ?_
    rw [L.add]
    exact add_le_add (le_refl _) ih
theorem union_budget {ι : Type w} (ev : ι → Ω → Bool) (δ : ι → α) (l : List ι) (h : ∀ i, L.P (ev i) ≤ δ i) :
    L.P (anyOf ev l) ≤ sum δ l := le_trans (L.union_bound ev l) (sum_le l h)

/-- `t ≤ x` as an event. -/
def geB (t x : α) : Bool := decide (t ≤ x)
/-- `c < x` as an event: a violation. -/
def gtB (c x : α) : Bool := not (decide (x ≤ c))
theorem ge_cases (t x : α) : (t ≤ x ∧ geB t x = true) ∨ (x < t ∧ geB t x = false) := by
  show (t ≤ x ∧ @decide (t ≤ x) (OrderedField.decLe t x) = true) ∨ (x < t ∧ @decide (t ≤ x) (OrderedField.decLe t x) = false)
  cases OrderedField.decLe t x with
  | isTrue h => exact Or.inl ⟨h, rfl⟩
  | isFalse h => exact Or.inr ⟨h, rfl⟩
theorem gt_cases (c x : α) : (x ≤ c ∧ gtB c x = false) ∨ (c < x ∧ gtB c x = true) := by
  show (x ≤ c ∧ not (@decide (x ≤ c) (OrderedField.decLe x c)) = false) ∨ (c < x ∧ not (@decide (x ≤ c) (OrderedField.decLe x c)) = true)
  cases OrderedField.decLe x c with
  | isTrue h => exact Or.inl ⟨h, rfl⟩
  | isFalse h => exact Or.inr ⟨h, rfl⟩
/-- A violation of a valid radius has probability zero. -/
theorem P_gt_zero {X : Ω → α} {c : Ω → α} (h : ∀ o, X o ≤ c o) : L.P (fun o => gtB (c o) (X o)) = 0 := by
  refine (L.congr (g := fun _ => 0) (fun o => ?_)).trans (L.const 0)
  cases gt_cases (c o) (X o) with
  | inl k => exact congrArg ind k.2
  | inr k => exact absurd (h o) k.1
end

/-! ### Chernoff -/
variable {α : Type u} [ExpField α] {Ω : Type v} (L : Law α Ω)

/-- **Chernoff, one side.** If `E e^{λX} ≤ e^{λ²v/2}` for all `λ` and `t² ≥ 2vℓ`, then `P(X ≥ t) ≤ e^{-ℓ}`.

Code: `witcert_core.cache.radii.radius_dither`.
`python: dither.prob(lambda o: dither.centred(o) >= dither.t) <= exp_up(-dither.t ** 2 / (2 * dither.sigma_sq()))` -/
theorem chernoff (X : Ω → α) {v t ell : α} (hv : 0 < v) (ht : 0 ≤ t) (hl : 2 * v * ell ≤ t * t)
    (hmgf : ∀ lam : α, L.E (fun o => exp (lam * X o)) ≤ exp (2⁻¹ * (lam * lam * v))) :
    L.P (fun o => geB t (X o)) ≤ exp (-ell) := by
  have hv1 := mul_inv_cancel hv
  have hl0 : 0 ≤ t * v⁻¹ := nonneg_mul ht (inv_nonneg hv)
  have h1 : L.P (fun o => geB t (X o)) * exp (t * v⁻¹ * t) ≤ exp (2⁻¹ * (t * v⁻¹ * (t * v⁻¹) * v)) := by
    refine le_trans ?_ (hmgf (t * v⁻¹))
    show L.E (fun o => ind (geB t (X o))) * _ ≤ _
    rw [mul_comm, ← L.smul]
    refine L.mono (fun o => ?_)
    cases ge_cases t (X o) with
    | inl h => rw [h.2]; exact le_trans (le_of_eq (mul_one _)) (exp_mono (mul_le_mul_left hl0 h.1))
    | inr h => rw [h.2]; exact le_trans (le_of_eq (show _ * (0 : α) = 0 from by ring)) (exp_nonneg _)
  have h2 : exp (2⁻¹ * (t * v⁻¹ * (t * v⁻¹) * v)) ≤ exp (-ell) * exp (t * v⁻¹ * t) := by
    rw [← exp_add]
    refine exp_mono (le_cert (nonneg_mul (nonneg_mul half_nonneg (inv_nonneg hv)) (sub_nonneg hl)) ?_)
    exact eq_lin2 hv1 two_half (ell - 2⁻¹ * t * t * v⁻¹) (v * v⁻¹ * ell - t * t * v⁻¹) (by ring)
  have h3 := le_trans h1 h2
  rw [mul_comm _ (exp (t * v⁻¹ * t)), mul_comm (exp (-ell))] at h3
  exact le_of_mul_le (exp_pos _) h3

/-- **Chernoff, two sides**: `P(|X| ≥ t) ≤ 2 e^{-ℓ}`.

Code: `witcert_core.cache.radii.radius_dither` (`ln(2S/δ)`: the 2 is this one).
`python: dither.prob(lambda o: abs(dither.centred(o)) >= dither.t) <= 2 * exp_up(-dither.t ** 2 / (2 * dither.sigma_sq()))` -/
theorem chernoff_abs (X : Ω → α) {v t ell : α} (hv : 0 < v) (ht : 0 ≤ t) (hl : 2 * v * ell ≤ t * t)
    (hmgf : ∀ lam : α, L.E (fun o => exp (lam * X o)) ≤ exp (2⁻¹ * (lam * lam * v))) :
    L.P (fun o => geB t (abs (X o))) ≤ 2 * exp (-ell) := by
  have h1 := L.chernoff X hv ht hl hmgf
  have h2 := L.chernoff (fun o => -(X o)) hv ht hl (fun lam => by
    refine le_trans (le_of_eq (L.congr (fun o => ?_))) (le_trans (hmgf (-lam)) (le_of_eq ?_))
    · exact congrArg exp (by ring)
    · exact congrArg exp (by ring))
  have h3 : L.P (fun o => geB t (abs (X o))) ≤ L.P (fun o => geB t (X o)) + L.P (fun o => geB t (-(X o))) := by
    show L.E _ ≤ L.E _ + L.E _
    rw [← L.add]
    refine L.mono (fun o => ?_)
    show ind (geB t (abs (X o))) ≤ ind (geB t (X o)) + ind (geB t (-(X o)))
    cases abs_cases (X o) with
    | inl h => rw [h.2]; exact le_cert (ind_nonneg (geB t (-(X o)))) (by ring)
    | inr h => rw [h.2]; exact le_cert (ind_nonneg (geB t (X o))) (by ring)
  exact le_trans h3 (le_trans (add_le_add h1 h2) (le_of_eq (by ring)))
end Law
end WitCert
