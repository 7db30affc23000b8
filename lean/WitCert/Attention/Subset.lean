import WitCert.Attention.Cell
/-!
# Sets of tokens

The total variation of a cell is `p(S) - w(S)` for the set `S` of raised tokens (`a ≥ Z`). A set is a function
`s : ι → α` with values 0 and 1; a *fractional* set has values in `[0, 1]` (tokens cut into pieces).
-/
set_option synthInstance.maxSize 4000
universe u v
namespace WitCert
variable {α : Type u} [OrderedField α] {ι : Type v}

/-- A set of tokens, as a 0/1 function. -/
def IsSet (s : ι → α) : Prop := ∀ t, s t = 0 ∨ s t = 1
/-- A fractional set of tokens. -/
def IsFrac (s : ι → α) : Prop := ∀ t, 0 ≤ s t ∧ 0 ≤ 1 - s t
theorem IsSet.frac {s : ι → α} (h : IsSet s) : IsFrac s := fun t => by
  cases h t with
  | inl h => rw [h]; exact ⟨le_refl 0, nonneg_cert zero_le_one (by ring)⟩
  | inr h => rw [h]; exact ⟨zero_le_one, le_of_eq (by ring)⟩
theorem IsSet.sq {s : ι → α} (h : IsSet s) (t : ι) : s t * s t = s t := by
  cases h t with
  | inl h => rw [h]; ring
  | inr h => rw [h]; ring
theorem IsSet.compl {s : ι → α} (h : IsSet s) : IsSet (fun t => 1 - s t) := fun t => by
  show 1 - s t = 0 ∨ 1 - s t = 1
  cases h t with
  | inl h => rw [h]; exact Or.inr (by ring)
  | inr h => rw [h]; exact Or.inl (by ring)

/-- Spread inside a set: with `μ, η, Q` the sums of `w, w f, w f²`, a subset of mass `m` whose `f`-sum is `u` has
`(μ u - m η)² ≤ m (μ - m)(μ Q - η²)`. -/
theorem subset_spread {w s : ι → α} (hw : ∀ t, 0 ≤ w t) (hs : IsSet s) (f : ι → α) (l : List ι)
    {μ m η Q u : α} (hμ : sum w l = μ) (hm : sum (fun t => w t * s t) l = m) (hη : sum (fun t => w t * f t) l = η)
    (hQ : sum (fun t => w t * (f t * f t)) l = Q) (hu : sum (fun t => w t * (s t * f t)) l = u) (hm0 : m = 0 → u = 0) :
    (μ * u - m * η) * (μ * u - m * η) ≤ m * (μ - m) * (μ * Q - η * η) := by
  have cs := cauchy_schwarz_w hw (fun t => μ * s t + -m) (fun t => μ * f t + -η) l
  have e1 : sum (fun t => w t * ((μ * s t + -m) * (μ * f t + -η))) l = μ * (μ * u - m * η) := by
    rw [sum_congr l (g := fun t => μ * μ * (w t * (s t * f t)) + -(μ * η) * (w t * s t) + (1 * (-(μ * m) * (w t * f t) + m * η * w t)))
      (fun t => by ring), sum_lin3, sum_lin2, hμ, hm, hη, hu]
    ring
  have e2 : sum (fun t => w t * ((μ * s t + -m) * (μ * s t + -m))) l = μ * (m * (μ - m)) := by
    rw [sum_congr l (g := fun t => (μ * μ - 2 * μ * m) * (w t * s t) + m * m * w t)
      (fun t => eq_lin (hs.sq t) (μ * μ * w t) (by ring)), sum_lin2, hμ, hm]
    ring
  have e3 : sum (fun t => w t * ((μ * f t + -η) * (μ * f t + -η))) l = μ * (μ * Q - η * η) := by
    rw [sum_congr l (g := fun t => μ * μ * (w t * (f t * f t)) + -(2 * μ * η) * (w t * f t) + η * η * w t)
      (fun t => by ring), sum_lin3, hμ, hη, hQ]
    ring
  rw [e1, e2, e3] at cs
  have hμ0 : 0 ≤ μ := by rw [← hμ]; exact sum_nonneg l hw
  have hm1 : 0 ≤ m := by rw [← hm]; exact sum_nonneg l (fun t => nonneg_mul (hw t) (hs.frac t).1)
  have hm2 : 0 ≤ μ - m := by
    rw [← hm, ← hμ, ← sum_sub]
    exact sum_nonneg l (fun t => nonneg_cert (nonneg_mul (hw t) (hs.frac t).2) (by ring))
  cases le_or_lt μ 0 with
  | inl hz =>
    have em : m = 0 := le_antisymm (le_trans (le_of_sub_nonneg hm2) hz) hm1
    rw [hm0 em, em]
    exact le_of_eq (by ring)
  | inr hp =>
    refine le_of_mul_le (mul_pos hp hp) (le_trans (le_of_eq ?_) (le_trans cs (le_of_eq ?_)))
    · ring
    · ring

/-- The bound from `subset_spread` is monotone where it is used: a set of mass `m ≤ m₁ ≤ μ` whose sum `u` is at most
the total `η` has `μ u ≤ m₁ η + s₁` for any `s₁ ≥ 0` with `m₁ (μ - m₁) W ≤ s₁²`. -/
theorem spread_mono {μ m m₁ η u W s₁ : α} (h0 : 0 ≤ m) (h1 : m ≤ m₁) (h2 : m₁ ≤ μ) (hu : u ≤ η) (hW : 0 ≤ W) (hs : 0 ≤ s₁)
    (hs1 : m₁ * (μ - m₁) * W ≤ s₁ * s₁) (hsp : (μ * u - m * η) * (μ * u - m * η) ≤ m * (μ - m) * W) :
    μ * u ≤ m₁ * η + s₁ := by
  cases le_or_lt μ m with
  | inl hz =>
    -- then m = m₁ = μ
    have e1 : m₁ = μ := le_antisymm h2 (le_trans hz h1)
    have hμ : 0 ≤ μ := le_trans h0 (le_trans h1 h2)
    rw [e1]
    exact le_cert (add_nonneg hs (nonneg_mul hμ (sub_nonneg hu))) (by ring)
  | inr hp =>
    have hd : 0 < μ - m := pos_of_sub hp
    have hq : 0 ≤ μ - m₁ := sub_nonneg h2
    -- (μ - m₁)(μ u - m η) ≤ (μ - m) s₁, by squares
    have h3 : (μ - m₁) * (μ * u - m * η) ≤ (μ - m) * s₁ := by
      refine le_of_sq_le (nonneg_mul (le_of_lt hd) hs) ?_
      have a1 : 0 ≤ (μ - m₁) * (μ - m₁) * (m * (μ - m) * W - (μ * u - m * η) * (μ * u - m * η)) :=
        nonneg_mul (nonneg_mul hq hq) (sub_nonneg hsp)
      have a2 : 0 ≤ (μ - m) * (μ - m) * (s₁ * s₁ - m₁ * (μ - m₁) * W) :=
        nonneg_mul (nonneg_mul (le_of_lt hd) (le_of_lt hd)) (sub_nonneg hs1)
      have a3 : 0 ≤ (μ - m) * (μ - m₁) * W * (μ * (m₁ - m)) :=
        nonneg_mul (nonneg_mul (nonneg_mul (le_of_lt hd) hq) hW) (nonneg_mul (le_trans h0 (le_trans h1 h2)) (sub_nonneg h1))
      exact le_cert (add_nonneg (add_nonneg a1 a2) a3) (by ring)
    have h4 : 0 ≤ (m₁ - m) * (μ * (η - u)) :=
      nonneg_mul (sub_nonneg h1) (nonneg_mul (le_trans h0 (le_trans h1 h2)) (sub_nonneg hu))
    exact le_of_mul_le hd (le_cert (add_nonneg (sub_nonneg h3) h4) (by ring))

namespace Cell
variable (x : Cell α ι)
/-- Tokens whose ratio is at least the mean. -/
def raised (t : ι) : α := if x.Z ≤ x.a t then 1 else 0
theorem raised_cases (t : ι) : (x.Z ≤ x.a t ∧ x.raised t = 1) ∨ (x.a t ≤ x.Z ∧ x.raised t = 0) := by
  show (x.Z ≤ x.a t ∧ @ite α _ (OrderedField.decLe x.Z (x.a t)) 1 0 = 1) ∨ (x.a t ≤ x.Z ∧ @ite α _ (OrderedField.decLe x.Z (x.a t)) 1 0 = 0)
  cases OrderedField.decLe x.Z (x.a t) with
  | isTrue h => exact Or.inl ⟨h, rfl⟩
  | isFalse h => exact Or.inr ⟨le_of_lt h, rfl⟩
theorem raised_isSet : IsSet x.raised := fun t =>
  (x.raised_cases t).elim (fun h => Or.inr h.2) (fun h => Or.inl h.2)

/-- A set `s` together with what is known about its true ratios: `TV·(U₀ + V₀) = U₀ - m(U₀ + V₀)`. -/
structure Attack (s : ι → α) (U₀ V₀ : α) : Prop where
  isSet : IsSet s
  U₀_eq : U₀ = x.mean (fun t => s t * x.a t)
  V₀_eq : V₀ = x.mean (fun t => (1 - s t) * x.a t)
  pos : 0 < U₀ + V₀
  tv : x.TV * (U₀ + V₀) = U₀ - x.mean s * (U₀ + V₀)

/-- `TV = p(S) - w(S)` for the set `S` of raised tokens. -/
theorem Sound.attack {x : Cell α ι} (h : x.Sound) :
    x.Attack x.raised (x.mean (fun t => x.raised t * x.a t)) (x.mean (fun t => (1 - x.raised t) * x.a t)) := by
  have hZ : x.mean (fun t => x.raised t * x.a t) + x.mean (fun t => (1 - x.raised t) * x.a t) = x.Z := by
    rw [← mean_add]
    exact x.mean_congr (fun t => by ring)
  refine ⟨x.raised_isSet, rfl, rfl, by rw [hZ]; exact h.Z_pos, ?_⟩
  rw [hZ]
  have e : ∀ t, abs (x.a t - x.Z) = 2 * (x.raised t * (x.a t - x.Z)) + 1 * (x.Z - x.a t) := fun t => by
    cases x.raised_cases t with
    | inl h => rw [h.2, abs_of_nonneg (sub_nonneg h.1)]; ring
    | inr h =>
      have e : abs (x.a t - x.Z) = x.Z - x.a t := by
        refine le_antisymm (abs_le (le_cert (add_nonneg (sub_nonneg h.1) (sub_nonneg h.1)) (by ring)) (le_of_eq (by ring))) ?_
        exact le_trans (le_of_eq (by ring)) (neg_le_abs (x.a t - x.Z))
      rw [h.2, e]; ring
  have e1 : x.mean (fun t => x.raised t * (x.a t - x.Z)) = x.mean (fun t => x.raised t * x.a t) - x.Z * x.mean x.raised :=
    (x.mean_congr (g := fun t => 1 * (x.raised t * x.a t) + -x.Z * x.raised t) (fun t => by ring)).trans ((x.mean_lin _ _ _ _).trans (by ring))
  have e2 : x.mean (fun t => x.Z - x.a t) = 0 :=
    (x.mean_congr (g := fun t => -1 * x.a t + 0 * x.a t + x.Z) (fun t => by ring)).trans ((h.mean_lin2 _ _ _ _ _).trans (by
      show -1 * x.Z + 0 * x.Z + x.Z = 0
      ring))
  have hM : x.M = 2 * (x.mean (fun t => x.raised t * x.a t) - x.Z * x.mean x.raised) := by
    rw [show x.M = _ from x.mean_congr e, mean_lin, e1, e2]
    ring
  have h2 := h.tv2_eq_M
  rw [hM] at h2
  refine eq_lin3 h2 h.Zu two_half (2⁻¹ * x.Z) (2 * 2⁻¹ * (x.mean (fun t => x.raised t * x.a t) - x.Z * x.mean x.raised))
    (x.mean (fun t => x.raised t * x.a t) - x.Z * x.mean x.raised - x.TV * x.Z) (by ring)
end Cell
end WitCert
