import WitCert.Attention.Subset
/-!
# Threshold sets

`upper θ τ` contains the tokens of radius above `θ`, the fraction `τ` of those at `θ`, and none below: what the sweep
of the code visits, tokens being sorted by falling radius. Any value of `Z` between its extremes is reached by such a set.
-/
set_option synthInstance.maxSize 4000
universe u v
namespace WitCert.Cell
variable {α : Type u} [OrderedField α] {ι : Type v}

section
variable (x : Cell α ι)
/-- `Σ_S w e^c`. -/
def up (s : ι → α) : α := x.mean (fun t => s t * x.r t)
/-- `Σ_{S^c} w e^{-c}`. -/
def lo (s : ι → α) : α := x.mean (fun t => (1 - s t) * (x.r t)⁻¹)
/-- The value of an attack that raises `s` and lowers the rest: `a/(a + y) - α`. -/
def attackValue (s : ι → α) : α := x.up s / (x.up s + x.lo s) - x.mean s
/-- The threshold set at radius `θ`, with the fraction `τ` of the tokens at `θ`. -/
def upper (θ τ : α) (t : ι) : α := if x.r t ≤ θ then (if θ ≤ x.r t then τ else 0) else 1

theorem upper_cases (θ τ : α) (t : ι) :
    (θ < x.r t ∧ x.upper θ τ t = 1) ∨ (x.r t = θ ∧ x.upper θ τ t = τ) ∨ (x.r t < θ ∧ x.upper θ τ t = 0) := by
  show (θ < x.r t ∧ @ite α _ (OrderedField.decLe (x.r t) θ) (@ite α _ (OrderedField.decLe θ (x.r t)) τ 0) 1 = 1) ∨
    (x.r t = θ ∧ @ite α _ (OrderedField.decLe (x.r t) θ) (@ite α _ (OrderedField.decLe θ (x.r t)) τ 0) 1 = τ) ∨
    (x.r t < θ ∧ @ite α _ (OrderedField.decLe (x.r t) θ) (@ite α _ (OrderedField.decLe θ (x.r t)) τ 0) 1 = 0)
  cases OrderedField.decLe (x.r t) θ with
  | isFalse h => exact Or.inl ⟨h, rfl⟩
  | isTrue h => cases OrderedField.decLe θ (x.r t) with
    | isFalse k => exact Or.inr (Or.inr ⟨k, rfl⟩)
    | isTrue k => exact Or.inr (Or.inl ⟨le_antisymm h k, rfl⟩)
theorem upper_isFrac {θ τ : α} (h0 : 0 ≤ τ) (h1 : 0 ≤ 1 - τ) : IsFrac (x.upper θ τ) := fun t => by
  cases x.upper_cases θ τ t with
  | inl h => rw [h.2]; exact ⟨zero_le_one, le_of_eq (by ring)⟩
  | inr h => cases h with
    | inl h => rw [h.2]; exact ⟨h0, h1⟩
    | inr h => rw [h.2]; exact ⟨le_refl 0, nonneg_cert zero_le_one (by ring)⟩
theorem upper_zero {θ : α} {t : ι} (h : x.r t ≤ θ) : x.upper θ 0 t = 0 := by
  cases x.upper_cases θ 0 t with
  | inl k => exact absurd h k.1
  | inr k => cases k with
    | inl k => exact k.2
    | inr k => exact k.2
theorem upper_one {θ : α} {t : ι} (h : θ ≤ x.r t) : x.upper θ 1 t = 1 := by
  cases x.upper_cases θ 1 t with
  | inl k => exact k.2
  | inr k => cases k with
    | inl k => exact k.2
    | inr k => exact absurd h k.1
theorem upper_above {θ τ : α} {t : ι} (h : θ < x.r t) : x.upper θ τ t = 1 := by
  cases x.upper_cases θ τ t with
  | inl k => exact k.2
  | inr k => cases k with
    | inl k => exact absurd (le_of_eq k.1) h
    | inr k => exact absurd (le_of_lt k.1) h
theorem upper_below {θ τ : α} {t : ι} (h : x.r t < θ) : x.upper θ τ t = 0 := by
  cases x.upper_cases θ τ t with
  | inl k => exact absurd (le_of_lt h) k.1
  | inr k => cases k with
    | inl k => exact absurd (le_of_eq k.1.symm) h
    | inr k => exact k.2
/-- The sets at one threshold interpolate between the strict and the full one. -/
theorem upper_mix (θ τ : α) (t : ι) : x.upper θ τ t = (1 - τ) * x.upper θ 0 t + τ * x.upper θ 1 t := by
  cases x.upper_cases θ τ t with
  | inl h => rw [h.2, x.upper_above h.1, x.upper_above h.1]; ring
  | inr h => cases h with
    | inl h => rw [h.2, x.upper_zero (le_of_eq h.1), x.upper_one (le_of_eq h.1.symm)]; ring
    | inr h => rw [h.2, x.upper_below h.1, x.upper_below h.1]; ring

theorem z_eq (s : ι → α) : x.up s + x.lo s = x.mean (fun t => s t * x.r t + (1 - s t) * (x.r t)⁻¹) := (x.mean_add _ _).symm
theorem z_mix (θ τ : α) : x.up (x.upper θ τ) + x.lo (x.upper θ τ)
    = (1 - τ) * (x.up (x.upper θ 0) + x.lo (x.upper θ 0)) + τ * (x.up (x.upper θ 1) + x.lo (x.upper θ 1)) := by
  rw [z_eq, z_eq, z_eq, ← mean_lin]
  exact x.mean_congr (fun t => by rw [x.upper_mix θ τ t]; ring)
end

variable {x : Cell α ι}

/-- A target between the strict and the full set at `θ` is reached at `θ`. -/
theorem reach_at {θ z : α} (h0 : x.up (x.upper θ 0) + x.lo (x.upper θ 0) ≤ z) (h1 : z ≤ x.up (x.upper θ 1) + x.lo (x.upper θ 1)) :
    ∃ τ, 0 ≤ τ ∧ 0 ≤ 1 - τ ∧ x.up (x.upper θ τ) + x.lo (x.upper θ τ) = z := by
  have mix := x.z_mix θ
  generalize x.up (x.upper θ 0) + x.lo (x.upper θ 0) = g at h0 mix
  generalize x.up (x.upper θ 1) + x.lo (x.upper θ 1) = k at h1 mix
  cases le_or_lt k g with
  | inl hz =>
    refine ⟨0, le_refl 0, nonneg_cert zero_le_one (by ring), ?_⟩
    rw [mix 0]
    refine le_antisymm ?_ ?_
    · exact le_trans (le_of_eq (by ring)) h0
    · exact le_trans h1 (le_trans hz (le_of_eq (by ring)))
  | inr hp =>
    have hd := pos_of_sub hp
    refine ⟨(z - g) / (k - g), div_nonneg (sub_nonneg h0) hd, sub_nonneg (div_le hd (le_cert (sub_nonneg h1) (by ring))), ?_⟩
    rw [mix]
    exact eq_lin (mul_div_cancel (a := z - g) hd) 1 (by ring)

variable (h : x.Sound)
include h

/-- `Z` grows with the set. -/
theorem Sound.z_mono {s s' : ι → α} (hs : ∀ t, s t ≤ s' t) : x.up s + x.lo s ≤ x.up s' + x.lo s' := by
  rw [z_eq, z_eq]
  refine h.mean_le (fun t => ?_)
  have k : 0 ≤ x.r t - (x.r t)⁻¹ := sub_nonneg (le_of_mul_le (h.r_pos t) (by
    rw [mul_inv_cancel (h.r_pos t)]
    exact le_trans (h.one_le_r t) (le_cert (nonneg_mul (le_of_lt (h.r_pos t)) (sub_nonneg (h.one_le_r t))) (by ring))))
  exact le_cert (nonneg_mul (sub_nonneg (hs t)) k) (by ring)

/-- Search among the candidates `k` between a low and a high threshold. -/
theorem Sound.reach_between {z : α} (k : List ι) : ∀ θ₀ θ₁ : α, θ₀ ≤ θ₁ → x.up (x.upper θ₁ 0) + x.lo (x.upper θ₁ 0) ≤ z →
    z ≤ x.up (x.upper θ₀ 1) + x.lo (x.upper θ₀ 1) → AllOf (fun t => x.r t ≤ θ₀ ∨ θ₁ ≤ x.r t ∨ InImage x.r (x.r t) k) x.l →
    ∃ θ τ, 0 ≤ τ ∧ 0 ≤ 1 - τ ∧ x.up (x.upper θ τ) + x.lo (x.upper θ τ) = z := by
  induction k with
  | nil =>
    intro θ₀ θ₁ h01 h1 h0 hall
    cases le_or_lt θ₁ θ₀ with
    | inl hz =>
      have e : θ₀ = θ₁ := le_antisymm h01 hz
      rw [e] at h0
      exact ⟨θ₁, reach_at h1 h0⟩
    | inr hp =>
      -- nothing lies between: the strict set at θ₀ is the full set at θ₁
      have e : x.up (x.upper θ₀ 0) + x.lo (x.upper θ₀ 0) = x.up (x.upper θ₁ 1) + x.lo (x.upper θ₁ 1) := by
        rw [z_eq, z_eq]
        refine sum_congr_all x.l (AllOf.imp x.l (fun t ht => ?_) hall)
        have es : x.upper θ₀ 0 t = x.upper θ₁ 1 t := by
          cases ht with
          | inl ht => rw [x.upper_zero ht, x.upper_below (lt_of_le_of_lt ht hp)]
          | inr ht => cases ht with
            | inl ht => rw [x.upper_above (lt_of_lt_of_le hp ht), x.upper_one ht]
            | inr ht => exact False.elim ht
        show x.w t * (x.upper θ₀ 0 t * x.r t + (1 - x.upper θ₀ 0 t) * (x.r t)⁻¹) = x.w t * (x.upper θ₁ 1 t * x.r t + (1 - x.upper θ₁ 1 t) * (x.r t)⁻¹)
        rw [es]
      cases le_total (x.up (x.upper θ₀ 0) + x.lo (x.upper θ₀ 0)) z with
      | inl hg => exact ⟨θ₀, reach_at hg h0⟩
      | inr hg =>
        rw [e] at hg
        exact ⟨θ₁, reach_at h1 hg⟩
  | cons i k ih =>
    intro θ₀ θ₁ h01 h1 h0 hall
    cases le_or_lt (x.r i) θ₀ with
    | inl c => exact ih θ₀ θ₁ h01 h1 h0 (AllOf.imp x.l (fun t ht => ht.elim Or.inl (fun ht => ht.elim (fun ht => Or.inr (Or.inl ht))
        (fun ht => ht.elim (fun e => Or.inl (le_trans (le_of_eq e.symm) c)) (fun ht => Or.inr (Or.inr ht))))) hall)
    | inr c => cases le_or_lt θ₁ (x.r i) with
      | inl d => exact ih θ₀ θ₁ h01 h1 h0 (AllOf.imp x.l (fun t ht => ht.elim Or.inl (fun ht => ht.elim (fun ht => Or.inr (Or.inl ht))
          (fun ht => ht.elim (fun e => Or.inr (Or.inl (le_trans d (le_of_eq e)))) (fun ht => Or.inr (Or.inr ht))))) hall)
      | inr d => cases le_total (x.up (x.upper (x.r i) 0) + x.lo (x.upper (x.r i) 0)) z with
        | inl hg => exact ih θ₀ (x.r i) (le_of_lt c) hg h0 (AllOf.imp x.l (fun t ht => ht.elim Or.inl (fun ht => ht.elim
            (fun ht => Or.inr (Or.inl (le_trans (le_of_lt d) ht)))
            (fun ht => ht.elim (fun e => Or.inr (Or.inl (le_of_eq e))) (fun ht => Or.inr (Or.inr ht))))) hall)
        | inr hg =>
          have hk : z ≤ x.up (x.upper (x.r i) 1) + x.lo (x.upper (x.r i) 1) := le_trans hg (h.z_mono (fun t => by
            cases x.upper_cases (x.r i) 0 t with
            | inl a => rw [a.2, x.upper_above a.1]; exact le_refl 1
            | inr a => cases a with
              | inl a => rw [a.2, x.upper_one (le_of_eq a.1.symm)]; exact zero_le_one
              | inr a => rw [a.2, x.upper_below a.1]; exact le_refl 0))
          exact ih (x.r i) θ₁ (le_of_lt d) h1 hk (AllOf.imp x.l (fun t ht => ht.elim (fun ht => Or.inl (le_trans ht (le_of_lt c)))
            (fun ht => ht.elim (fun ht => Or.inr (Or.inl ht)) (fun ht => ht.elim (fun e => Or.inl (le_of_eq e.symm)) (fun ht => Or.inr (Or.inr ht))))) hall)

/-- **Threshold sets reach every `Z`** between all tokens lowered and all tokens raised.

Code: `witcert_core.meter.bounds.extremal.bound` (the sweep).
`python: z_of(threshold(target)) == target` -/
theorem Sound.threshold_reaches (R : α) (hR : ∀ t, x.r t ≤ R) {z : α} (h0 : x.mean (fun t => (x.r t)⁻¹) ≤ z) (h1 : z ≤ x.A) :
    ∃ θ τ, 0 ≤ τ ∧ 0 ≤ 1 - τ ∧ x.up (x.upper θ τ) + x.lo (x.upper θ τ) = z := by
  refine h.reach_between x.l 1 R (le_trans h.one_le_A (h.A_le hR)) ?_ ?_ (AllOf.imp x.l (fun _ k => Or.inr (Or.inr k)) (allOf_inImage x.r x.l))
  · refine le_trans (le_of_eq ?_) h0
    rw [z_eq]
    exact x.mean_congr (fun t => by rw [x.upper_zero (hR t)]; ring)
  · refine le_trans h1 (le_of_eq ?_)
    rw [z_eq]
    exact (x.mean_congr (fun t => by rw [x.upper_one (h.one_le_r t)]; ring)).symm
end WitCert.Cell
