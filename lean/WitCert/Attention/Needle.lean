import WitCert.Attention.Subset
/-!
# The `needle` form

One token `h` is set apart (the heaviest, in the code; any token is allowed here). Either `h` is outside the raised
set, and then its own mass stays in the denominator, or it is inside, and the complement lives among the rest.
The rest has mass `μ = 1 - w_h`, `A_r = Σ_r w e^c`, `η_r`, `Q_r` and largest ratio `R_r`; the code's variance is
`V_r = Q_r - η_r²/μ`, here `μ V_r = μ Q_r - η_r²`.
-/
set_option synthInstance.maxSize 4000
universe u v
namespace WitCert
variable {α : Type u} [OrderedField α] {ι : Type v}

/-- The rest of a cell once the token in front has been set apart. -/
structure Rest (x : Cell α ι) (i : ι) (l : List ι) (R μ A η Q : α) : Prop where
  split : x.l = .cons i l
  le_R : AllOf (fun t => x.r t ≤ R) l
  mass : sum x.w l = μ
  A_eq : sum (fun t => x.w t * x.r t) l = A
  η_eq : sum (fun t => x.w t * (x.r t - 1)) l = η
  Q_eq : sum (fun t => x.w t * ((x.r t - 1) * (x.r t - 1))) l = Q

/-- What is known of a set of the rest: mass `m` and `a = Σ_S w e^c`. -/
structure Reach (μ A W R m a : α) : Prop where
  m_nonneg : 0 ≤ m
  m_le : m ≤ μ
  a_nonneg : 0 ≤ a
  a_le : a ≤ A
  a_le_max : a ≤ m * R
  spread : (μ * a - m * A) * (μ * a - m * A) ≤ m * (μ - m) * W

/-- `ā` of the code: any number that is at least one of `A_r`, `m₁ e^{M_r}` and `m₁ A_r/μ + √(m₁(μ - m₁)V_r/μ)`. -/
def Admissible (μ A W R m₁ ā : α) : Prop :=
  A ≤ ā ∨ m₁ * R ≤ ā ∨ ∃ s, 0 ≤ s ∧ m₁ * (μ - m₁) * W ≤ s * s ∧ m₁ * A + s ≤ μ * ā

theorem Reach.le_of_admissible {μ A W R m a m₁ ā : α} (k : Reach μ A W R m a) (hW : 0 ≤ W) (hR : 0 ≤ R) (hμ : 0 < μ)
    (h1 : m ≤ m₁) (h2 : m₁ ≤ μ) (ha : Admissible μ A W R m₁ ā) : a ≤ ā := by
  cases ha with
  | inl c => exact le_trans k.a_le c
  | inr c => cases c with
    | inl c => exact le_trans k.a_le_max (le_trans (mul_le_mul_right hR h1) c)
    | inr c => cases c with
      | intro s c => exact le_of_mul_le hμ (le_trans (spread_mono k.m_nonneg h1 h2 k.a_le hW c.1 c.2.1 k.spread) c.2.2)

/-! ### Maximising `a/(a + y + q²/(A - a))` -/

/-- The value grows up to the stationary point `q·b = s·(A - b)`, `s² = q² + yA`. Written without division:
`(y(A-b) + q²)·a(A-a) ≤ (y(A-a) + q²)·b(A-b)`. -/
theorem needle_peak {A a b y q s : α} (hA : 0 ≤ A) (ha : 0 ≤ a) (haA : a ≤ A) (hb : 0 ≤ b) (hbA : b ≤ A) (hy : 0 ≤ y) (hq : 0 ≤ q)
    (hs : 0 ≤ s) (hsq : s * s = q * q + y * A) (hpk : (a ≤ b ∧ q * b ≤ s * (A - b)) ∨ q * b = s * (A - b)) :
    (y * (A - b) + q * q) * (a * (A - a)) ≤ (y * (A - a) + q * q) * (b * (A - b)) := by
  have hca := sub_nonneg haA
  have hcb := sub_nonneg hbA
  cases le_or_lt A 0 with
  | inl hz =>
    have e0 : A = 0 := le_antisymm hz hA
    have ea : a = 0 := le_antisymm (le_trans haA hz) ha
    have eb : b = 0 := le_antisymm (le_trans hbA hz) hb
    rw [e0, ea, eb]
    exact le_refl _
  | inr hp => cases hpk with
    | inl c =>
      refine le_of_mul_le hp ?_
      have k1 : 0 ≤ (s * (A - b) - q * b) * (s * (A - b) + q * b) :=
        nonneg_mul (sub_nonneg c.2) (add_nonneg (nonneg_mul hs hcb) (nonneg_mul hq hb))
      have k2 : 0 ≤ A * (y * (A - b) * (b - a)) := nonneg_mul hA (nonneg_mul (nonneg_mul hy hcb) (sub_nonneg c.1))
      have k3 : 0 ≤ A * (q * q * (b - a)) := nonneg_mul hA (nonneg_mul (nonneg_mul hq hq) (sub_nonneg c.1))
      exact le_cert (nonneg_mul (sub_nonneg c.1) (add_nonneg k1 (add_nonneg k2 k3)))
        (eq_lin hsq (-((b - a) * (A - b) * (A - b))) (by ring))
    | inr c =>
      refine le_of_mul_le (mul_pos hp hp) ?_
      have k : 0 ≤ (s * (A - a) - q * a) * (s * (A - a) - q * a) := sq_nonneg _
      -- at b the square vanishes
      have e1 : A * A * (y * (A - b) + q * q) = (s + q) * (s + q) * (b * (A - b)) :=
        eq_lin2 hsq c (-A * (A - b)) (-(s * (A - b) - q * b)) (by ring)
      have e2 : A * A * (y * (A - a) + q * q) - (s + q) * (s + q) * (a * (A - a)) = (s * (A - a) - q * a) * (s * (A - a) - q * a) :=
        eq_lin hsq (-A * (A - a)) (by ring)
      have k1 : 0 ≤ b * (A - b) * (A * A * (y * (A - a) + q * q) - (s + q) * (s + q) * (a * (A - a))) :=
        nonneg_mul (nonneg_mul hb hcb) (by rw [e2]; exact k)
      exact le_cert k1 (eq_lin e1 (-(a * (A - a))) (by ring))

/-- The first alternative of `needle`, `h` outside: from a bound at the true `(m, a)` to the cell's bound at `b`.
`T = TV + m₀`; the conclusion is `T ≤ b/(b + y + q₁²/(A - b))`, multiplied out, or `T ≤ b/(b + y)` when `q₁ = 0`. -/
theorem needle_outside {A a b y q q₁ s T v : α} (hA : 0 ≤ A) (ha : 0 ≤ a) (haA : a ≤ A) (hb : 0 ≤ b) (hbA : b ≤ A) (hy : 0 ≤ y)
    (hq1 : 0 ≤ q₁) (hqq : q₁ ≤ q) (hs : 0 ≤ s) (hsq : s * s = q₁ * q₁ + y * A)
    (hpk : (a ≤ b ∧ q₁ * b ≤ s * (A - b)) ∨ q₁ * b = s * (A - b)) (hT0 : 0 ≤ T)
    (hv : 0 ≤ v) (hvp : 0 < a + (y + v)) (hvA : q * q ≤ v * (A - a)) (hT : T * (a + (y + v)) ≤ a) :
    T * (b * (A - b) + y * (A - b) + q₁ * q₁) ≤ b * (A - b) := by
  have hca := sub_nonneg haA
  have hcb := sub_nonneg hbA
  have pk := needle_peak hA ha haA hb hbA hy hq1 hs hsq hpk
  have hqq2 : q₁ * q₁ ≤ q * q := mul_le_mul hq1 (le_trans hq1 hqq) hqq hqq
  have hT1 : T ≤ 1 := le_of_mul_le hvp (le_cert (add_nonneg (sub_nonneg hT) (add_nonneg hy hv)) (by ring))
  -- T · (a c + y c + q₁²) ≤ a c at the true set
  have h1 : T * (a * (A - a) + y * (A - a) + q₁ * q₁) ≤ a * (A - a) :=
    le_cert (add_nonneg (nonneg_mul hca (sub_nonneg hT)) (nonneg_mul hT0 (add_nonneg (sub_nonneg hvA) (sub_nonneg hqq2)))) (by ring)
  have hbc : 0 ≤ b * (A - b) := nonneg_mul hb hcb
  have hac : 0 ≤ a * (A - a) := nonneg_mul ha hca
  cases le_or_lt (a * (A - a) + y * (A - a) + q₁ * q₁) 0 with
  | inr hp =>
    refine le_of_mul_le hp ?_
    have k1 : 0 ≤ (b * (A - b) + y * (A - b) + q₁ * q₁) * (a * (A - a) - T * (a * (A - a) + y * (A - a) + q₁ * q₁)) :=
      nonneg_mul (add_nonneg (add_nonneg hbc (nonneg_mul hy hcb)) (sq_nonneg q₁)) (sub_nonneg h1)
    exact le_cert (add_nonneg k1 (sub_nonneg pk)) (by ring)
  | inl hz =>
    -- degenerate: q₁ = 0 and a c = y c = 0
    have e1 : q₁ * q₁ = 0 := le_antisymm (le_cert (add_nonneg (sub_nonneg hz) (add_nonneg hac (nonneg_mul hy hca))) (by ring)) (sq_nonneg q₁)
    have e2 : 0 ≤ -((a + y) * (A - a)) := nonneg_cert (add_nonneg (sub_nonneg hz) (sq_nonneg q₁)) (by ring)
    have h2 : T * ((a + y) * (A - b)) ≤ a * (A - b) :=
      le_cert (nonneg_mul hcb (add_nonneg (sub_nonneg hT) (nonneg_mul hT0 hv))) (by ring)
    cases le_or_lt a b with
    | inl hab =>
      rw [e1]
      exact le_cert (add_nonneg (sub_nonneg h2) (nonneg_mul (nonneg_mul hcb (sub_nonneg hT1)) (sub_nonneg hab))) (by ring)
    | inr hba =>
      -- a > b: then A - a = 0 or a + y = 0, and the peak condition gives s (A - b) = 0
      cases hpk with
      | inl c => exact absurd c.1 hba
      | inr c =>
        have eq0 : q₁ = 0 := by
          have z : q₁ ≤ 0 := le_of_sq_le (le_refl 0) (le_trans (le_of_eq e1) (le_of_eq (by ring)))
          exact le_antisymm z hq1
        have es : s * (A - b) = 0 := c.symm.trans (by rw [eq0]; ring)
        have hAb : 0 < A - b := pos_of_sub (lt_of_lt_of_le hba haA)
        have es0 : s = 0 := le_antisymm (le_of_mul_le hAb (le_of_eq ((mul_comm _ _).trans (es.trans (by ring))))) hs
        have ey : y * A = 0 := by
          rw [es0, eq0] at hsq
          exact eq_lin hsq (-1) (by ring)
        have hAp : 0 < A := lt_of_le_of_lt hb (lt_of_lt_of_le hba haA)
        have ey0 : y = 0 := le_antisymm (le_of_mul_le hAp (le_of_eq ((mul_comm _ _).trans (ey.trans (by ring))))) hy
        rw [ey0, e1]
        exact le_cert (nonneg_mul hbc (sub_nonneg hT1)) (by ring)

/-- The second alternative, `h` inside, through the complement: `TV ≤ m₁ - m₀²/(m₀² + Y(A - Y))`, multiplied out. -/
theorem needle_inside {A a Y m m₀ m₁ T : α} (hm0 : 0 ≤ m₀) (h0 : m₀ ≤ m) (h1 : m ≤ m₁) (hX : 0 ≤ a * (A - a))
    (hY : (a ≤ Y ∧ 2 * Y ≤ A) ∨ 2 * Y = A) (hp0 : 0 ≤ m - T) (hp1 : m - T ≤ 1)
    (hT : m * m ≤ (m - T) * (a * (A - a) + m * m)) : m₀ * m₀ ≤ (m₁ - T) * (Y * (A - Y) + m₀ * m₀) := by
  have hXY : a * (A - a) ≤ Y * (A - Y) := by
    cases hY with
    | inl c => exact le_cert (nonneg_mul (sub_nonneg c.1) (add_nonneg (sub_nonneg c.2) (sub_nonneg c.1))) (by ring)
    | inr c => exact le_cert (sq_nonneg (Y - a)) (eq_lin c (a - Y) (by ring))
  have hYY : 0 ≤ Y * (A - Y) := le_trans hX hXY
  have k1 : 0 ≤ (1 - (m - T)) * (m * m - m₀ * m₀) := nonneg_mul (sub_nonneg hp1)
    (sub_nonneg (mul_le_mul hm0 (le_trans hm0 h0) h0 h0))
  have k2 : 0 ≤ (m - T) * (Y * (A - Y) - a * (A - a)) := nonneg_mul hp0 (sub_nonneg hXY)
  have k3 : 0 ≤ (m₁ - m) * (Y * (A - Y) + m₀ * m₀) := nonneg_mul (sub_nonneg h1) (add_nonneg hYY (sq_nonneg m₀))
  exact le_cert (add_nonneg (add_nonneg (sub_nonneg hT) k1) (add_nonneg k2 k3)) (by ring)

/-- The mean of a cell splits into the front token and the rest. -/
theorem Rest.mean_split {x : Cell α ι} {i : ι} {l : List ι} {R μ A η Q : α} (hR : Rest x i l R μ A η Q) (f : ι → α) :
    x.mean f = x.w i * f i + sum (fun t => x.w t * f t) l := by
  show sum _ x.l = _
  rw [hR.split]
  rfl

namespace Cell.Sound
variable {x : Cell α ι} (h : x.Sound)
include h

/-- A set of the rest reaches what `subset_spread` says. -/
theorem reach {i : ι} {l : List ι} {R μ A η Q : α} (hR : Rest x i l R μ A η Q) {s : ι → α} (hs : IsSet s) :
    Reach μ A (μ * Q - η * η) R (sum (fun t => x.w t * s t) l) (sum (fun t => x.w t * (s t * x.r t)) l) := by
  have hm0 : 0 ≤ sum (fun t => x.w t * s t) l := sum_nonneg l (fun t => nonneg_mul (h.w_nonneg t) (hs.frac t).1)
  have ha0 : 0 ≤ sum (fun t => x.w t * (s t * x.r t)) l :=
    sum_nonneg l (fun t => nonneg_mul (h.w_nonneg t) (nonneg_mul (hs.frac t).1 (le_of_lt (h.r_pos t))))
  have hmax : sum (fun t => x.w t * (s t * x.r t)) l ≤ sum (fun t => x.w t * s t) l * R := by
    refine le_trans (sum_le_all l (AllOf.imp l (q := fun t => x.w t * (s t * x.r t) ≤ R * (x.w t * s t)) (fun t ht => ?_) hR.le_R))
      (le_of_eq ((sum_mul R _ l).trans (mul_comm _ _)))
    exact le_cert (nonneg_mul (nonneg_mul (h.w_nonneg t) (hs.frac t).1) (sub_nonneg ht)) (by ring)
  have hA : A = μ + η := by
    rw [← hR.A_eq, ← hR.mass, ← hR.η_eq, ← sum_add]; exact sum_congr l (fun t => by ring)
  have ea : sum (fun t => x.w t * (s t * x.r t)) l = sum (fun t => x.w t * s t) l + sum (fun t => x.w t * (s t * (x.r t - 1))) l := by
    rw [← sum_add]; exact sum_congr l (fun t => by ring)
  have hu0 : 0 ≤ sum (fun t => x.w t * (s t * (x.r t - 1))) l :=
    sum_nonneg l (fun t => nonneg_mul (h.w_nonneg t) (nonneg_mul (hs.frac t).1 (sub_nonneg (h.one_le_r t))))
  refine ⟨hm0, ?_, ha0, ?_, hmax, ?_⟩
  · rw [← hR.mass]
    exact sum_le l (fun t => le_cert (nonneg_mul (h.w_nonneg t) (hs.frac t).2) (by ring))
  · rw [← hR.A_eq]
    exact sum_le l (fun t => le_cert (nonneg_mul (h.w_nonneg t) (nonneg_mul (hs.frac t).2 (le_of_lt (h.r_pos t)))) (by ring))
  · have sp := subset_spread h.w_nonneg hs (fun t => x.r t - 1) l hR.mass rfl hR.η_eq hR.Q_eq rfl (fun e => le_antisymm (by
      rw [e] at ea hmax
      rw [ea] at hmax
      exact le_cert (sub_nonneg hmax) (by ring)) hu0)
    rw [ea, hA]
    exact le_trans (le_of_eq (by ring)) sp

/-- **Outside.** If the front token is not raised, some set of the rest has mass `m`, reaches `a`, and
`TV + m ≤ a/(a + w_h e^{-c_h} + v)` with `v ≥ (μ - m)²/(A_r - a)`. -/
theorem needle_outside_point {i : ι} {l : List ι} {R μ A η Q : α} (hR : Rest x i l R μ A η Q) (hi : x.raised i = 0) :
    ∃ m a, ∃ v, Reach μ A (μ * Q - η * η) R m a ∧ 0 ≤ v ∧ (μ - m) * (μ - m) ≤ v * (A - a) ∧ 0 < a + (x.w i / x.r i + v) ∧
      (x.TV + m) * (a + (x.w i / x.r i + v)) ≤ a := by
  have at0 := h.attack
  have hs := at0.isSet
  have hre := h.reach hR hs
  have em : x.mean x.raised = sum (fun t => x.w t * x.raised t) l := by
    rw [hR.mean_split, hi]; ring
  have eU : x.mean (fun t => x.raised t * x.a t) = sum (fun t => x.w t * (x.raised t * x.a t)) l := by
    rw [hR.mean_split, hi]; ring
  have eV : x.mean (fun t => (1 - x.raised t) * x.a t) = x.w i * x.a i + sum (fun t => x.w t * ((1 - x.raised t) * x.a t)) l := by
    rw [hR.mean_split, hi]; ring
  have hUa : sum (fun t => x.w t * (x.raised t * x.a t)) l ≤ sum (fun t => x.w t * (x.raised t * x.r t)) l :=
    sum_le l (fun t => mul_le_mul_left (h.w_nonneg t) (mul_le_mul_left (hs.frac t).1 (h.upper t)))
  have hU0 : 0 ≤ sum (fun t => x.w t * (x.raised t * x.a t)) l :=
    sum_nonneg l (fun t => nonneg_mul (h.w_nonneg t) (nonneg_mul (hs.frac t).1 (h.a_nonneg t)))
  have hV0 : 0 ≤ sum (fun t => x.w t * ((1 - x.raised t) * x.a t)) l :=
    sum_nonneg l (fun t => nonneg_mul (h.w_nonneg t) (nonneg_mul (hs.frac t).2 (h.a_nonneg t)))
  have hy : x.w i / x.r i ≤ x.w i * x.a i := by
    rw [div_eq]; exact mul_le_mul_left (h.w_nonneg i) (h.inv_r_le_a i)
  have hq := sum_sq_le_of_one_le_mul (v := fun t => x.w t * (1 - x.raised t)) (fun t => nonneg_mul (h.w_nonneg t) (hs.frac t).2)
    h.a_nonneg (fun t => le_of_lt (h.r_pos t)) h.lower l
  rw [show sum (fun t => x.w t * (1 - x.raised t)) l = μ - sum (fun t => x.w t * x.raised t) l from by
      rw [← hR.mass, ← sum_sub]; exact sum_congr l (fun t => by ring),
    show sum (fun t => x.w t * (1 - x.raised t) * x.r t) l = A - sum (fun t => x.w t * (x.raised t * x.r t)) l from by
      rw [← hR.A_eq, ← sum_sub]; exact sum_congr l (fun t => by ring),
    sum_congr l (f := fun t => x.w t * (1 - x.raised t) * x.a t) (g := fun t => x.w t * ((1 - x.raised t) * x.a t)) (fun t => by ring)] at hq
  have htv := at0.tv
  have hpos := at0.pos
  rw [em, eU, eV] at htv
  rw [eU, eV] at hpos
  revert hre hUa hU0 hV0 hq htv hpos
  generalize sum (fun t => x.w t * x.raised t) l = m
  generalize sum (fun t => x.w t * (x.raised t * x.r t)) l = a
  generalize sum (fun t => x.w t * (x.raised t * x.a t)) l = U₀
  generalize sum (fun t => x.w t * ((1 - x.raised t) * x.a t)) l = V₀
  have hya0 : 0 ≤ x.w i * x.a i := nonneg_mul (h.w_nonneg i) (h.a_nonneg i)
  generalize x.w i * x.a i = ya at hy hya0
  generalize x.w i / x.r i = y at hy
  intro hre hUa hU0 hV0 hq htv hpos
  have hya : 0 ≤ ya - y := sub_nonneg hy
  have e : y + (ya - y + V₀) = ya + V₀ := by ring
  have hT1 : x.TV + m ≤ 1 := le_of_mul_le hpos (by
    rw [show (U₀ + (ya + V₀)) * (x.TV + m) = U₀ from eq_lin htv 1 (by ring)]
    exact le_cert (add_nonneg hya0 hV0) (by ring))
  refine ⟨m, a, ya - y + V₀, hre, add_nonneg hya hV0, ?_, ?_, ?_⟩
  · exact le_trans hq (mul_le_mul_right (sub_nonneg hre.a_le) (le_cert hya (by ring)))
  · rw [e]; exact lt_of_lt_of_le hpos (le_cert (sub_nonneg hUa) (by ring))
  · rw [e]
    exact le_cert (nonneg_mul (sub_nonneg hUa) (sub_nonneg hT1)) (eq_lin htv (-1) (by ring))

/-- **Inside.** If the front token is raised, the complement is a set of the rest of mass `m` reaching `a`, and
`m - TV ≥ m²/(m² + a (A - a))` with the whole cell's `A`. -/
theorem needle_inside_point {i : ι} {l : List ι} {R μ A η Q : α} (hR : Rest x i l R μ A η Q) (hi : x.raised i = 1) :
    ∃ m a, Reach μ A (μ * Q - η * η) R m a ∧ a ≤ x.A ∧ 0 ≤ m - x.TV ∧ m - x.TV ≤ 1 ∧
      m * m ≤ (m - x.TV) * (a * (x.A - a) + m * m) := by
  have at0 := h.attack
  have hs := at0.isSet
  have hre := h.reach hR hs.compl
  have hq := sum_sq_le_of_one_le_mul (v := fun t => x.w t * (1 - x.raised t)) (fun t => nonneg_mul (h.w_nonneg t) (hs.frac t).2)
    h.a_nonneg (fun t => le_of_lt (h.r_pos t)) h.lower l
  rw [sum_congr l (f := fun t => x.w t * (1 - x.raised t) * x.a t) (g := fun t => x.w t * ((1 - x.raised t) * x.a t)) (fun t => by ring),
    sum_congr l (f := fun t => x.w t * (1 - x.raised t) * x.r t) (g := fun t => x.w t * ((1 - x.raised t) * x.r t)) (fun t => by ring)] at hq
  have em : x.mean x.raised = 1 - sum (fun t => x.w t * (1 - x.raised t)) l := by
    have e := (x.mean_sub (fun _ => 1) x.raised).symm.trans (hR.mean_split (fun t => 1 - x.raised t))
    rw [h.mean_const, hi] at e
    exact eq_lin e (-1) (by ring)
  have eV : x.mean (fun t => (1 - x.raised t) * x.a t) = sum (fun t => x.w t * ((1 - x.raised t) * x.a t)) l := by
    rw [hR.mean_split, hi]; ring
  have hU : x.mean (fun t => x.raised t * x.a t) ≤ x.A - sum (fun t => x.w t * ((1 - x.raised t) * x.r t)) l := by
    have e : x.mean (fun t => (1 - x.raised t) * x.r t) = sum (fun t => x.w t * ((1 - x.raised t) * x.r t)) l := by
      rw [hR.mean_split, hi]; ring
    rw [← e, show x.A = x.mean x.r from rfl, ← mean_sub]
    exact h.mean_le (fun t => le_cert (nonneg_mul (hs.frac t).1 (sub_nonneg (h.upper t))) (by ring))
  have hU0 : 0 ≤ x.mean (fun t => x.raised t * x.a t) := h.mean_nonneg (fun t => nonneg_mul (hs.frac t).1 (h.a_nonneg t))
  have hV0 : 0 ≤ sum (fun t => x.w t * ((1 - x.raised t) * x.a t)) l :=
    sum_nonneg l (fun t => nonneg_mul (h.w_nonneg t) (nonneg_mul (hs.frac t).2 (h.a_nonneg t)))
  have htv := at0.tv
  have hpos := at0.pos
  rw [em, eV] at htv
  rw [eV] at hpos
  revert hre hq hU hU0 hV0 htv hpos
  generalize sum (fun t => x.w t * (1 - x.raised t)) l = m
  generalize sum (fun t => x.w t * ((1 - x.raised t) * x.r t)) l = a
  generalize sum (fun t => x.w t * ((1 - x.raised t) * x.a t)) l = V₀
  generalize x.mean (fun t => x.raised t * x.a t) = U₀
  intro hre hq hU hU0 hV0 htv hpos
  have e : (U₀ + V₀) * (m - x.TV) = V₀ := eq_lin htv (-1) (by ring)
  have p0 : 0 ≤ m - x.TV := nonneg_of_mul hpos (by rw [e]; exact hV0)
  have p1 : m - x.TV ≤ 1 := le_of_mul_le hpos (by rw [e]; exact le_cert hU0 (by ring))
  refine ⟨m, a, hre, le_cert (add_nonneg hU0 (sub_nonneg hU)) (by ring), p0, p1, ?_⟩
  have k1 : 0 ≤ (1 - (m - x.TV)) * (V₀ * a - m * m) := nonneg_mul (sub_nonneg p1) (sub_nonneg hq)
  have k2 : 0 ≤ (m - x.TV) * (a * (x.A - a - U₀)) := nonneg_mul p0 (nonneg_mul hre.a_nonneg (sub_nonneg hU))
  exact le_cert (add_nonneg k1 k2) (eq_lin e a (by ring))

/-- **needle, simple.** For any token `h`: `TV ≤ max(1 - w_h, A_r/(A_r + w_h e^{-c_h}))`.

Code: `witcert_core.bounds.needle.bound`.
`python: TV <= max(1 - w_h, A_r / (A_r + w_h / r_h))` -/
theorem tv_le_needle_simple {i : ι} {l : List ι} {R μ A η Q : α} (hR : Rest x i l R μ A η Q) :
    x.TV ≤ 1 - x.w i ∨ x.TV ≤ A / (A + x.w i / x.r i) := by
  cases x.raised_isSet i with
  | inl hi => cases h.needle_outside_point hR hi with
    | intro m H => cases H with
      | intro a H => cases H with
        | intro v H =>
          refine Or.inr ?_
          have hd : 0 < A + x.w i / x.r i := by
            have hw : x.w i + μ = 1 := by
              rw [← h.w_sum, hR.split, ← hR.mass]; rfl
            have hA : μ ≤ A := by
              rw [← hR.mass, ← hR.A_eq]
              exact sum_le l (fun t => le_cert (nonneg_mul (h.w_nonneg t) (sub_nonneg (h.one_le_r t))) (by ring))
            have hμ : 0 ≤ μ := by rw [← hR.mass]; exact sum_nonneg l h.w_nonneg
            refine lt_of_lt_of_le (inv_pos (h.r_pos i)) (le_of_mul_le (h.r_pos i) ?_)
            exact le_cert (add_nonneg (sub_nonneg hA) (nonneg_mul (sub_nonneg (h.one_le_r i)) (le_trans hμ hA)))
              (eq_lin2 hw (mul_inv_cancel (h.r_pos i)) 1 (x.w i - 1) (by ring))
          have hy : 0 ≤ x.w i / x.r i := div_nonneg (h.w_nonneg i) (h.r_pos i)
          refine le_div hd ?_
          have hT1 : x.TV ≤ 1 := le_of_mul_le H.2.2.2.1 (le_cert (add_nonneg (add_nonneg (sub_nonneg H.2.2.2.2)
            (nonneg_mul H.1.m_nonneg (le_of_lt H.2.2.2.1))) (add_nonneg hy H.2.1)) (by ring))
          exact le_cert (add_nonneg (add_nonneg (sub_nonneg H.2.2.2.2) (nonneg_mul H.1.m_nonneg (le_of_lt H.2.2.2.1)))
            (add_nonneg (nonneg_mul h.TV_nonneg H.2.1) (nonneg_mul (sub_nonneg H.1.a_le) (sub_nonneg hT1)))) (by ring)
  | inr hi => cases h.needle_inside_point hR hi with
    | intro m H => cases H with
      | intro a H =>
        refine Or.inl (le_trans (le_of_sub_nonneg H.2.2.1) (le_trans H.1.m_le (le_of_eq ?_)))
        rw [← h.w_sum, hR.split, ← hR.mass]
        show sum x.w l = x.w i + sum x.w l - x.w i
        ring
end Cell.Sound

/-- What the code computes in one cell `[m₀, m₁]` of masses of the rest, for both alternatives; `B` bounds both values,
`y = w_h e^{-c_h}`, `Af` is the whole cell's `A`. The stationary point `b` is given by `q·b = s·(A - b)`. -/
structure NeedleCell (μ A W R y Af B m₀ m₁ ā b s Y : α) : Prop where
  m₀_nonneg : 0 ≤ m₀
  m₁_le : m₁ ≤ μ
  admissible : Admissible μ A W R m₁ ā
  b_nonneg : 0 ≤ b
  b_le : b ≤ A
  s_nonneg : 0 ≤ s
  s_sq : s * s = (μ - m₁) * (μ - m₁) + y * A
  outside : (((ā ≤ b ∧ (μ - m₁) * b ≤ s * (A - b)) ∨ (μ - m₁) * b = s * (A - b)) ∧
      0 < b * (A - b) + y * (A - b) + (μ - m₁) * (μ - m₁) ∧
      b * (A - b) ≤ (B + m₀) * (b * (A - b) + y * (A - b) + (μ - m₁) * (μ - m₁)))
    ∨ (ā ≤ b ∧ 0 < b + y ∧ b ≤ (B + m₀) * (b + y))
  complement : (ā ≤ Y ∧ 2 * Y ≤ Af) ∨ 2 * Y = Af
  inside : (0 < Y * (Af - Y) + m₀ * m₀ ∧ m₁ * (Y * (Af - Y) + m₀ * m₀) - m₀ * m₀ ≤ B * (Y * (Af - Y) + m₀ * m₀)) ∨ m₁ ≤ B

/-- **needle, refined.** Cells `[m₀ j, m₁ j]` cover the masses `[0, μ]` of the rest; if `B` is at least the code's value
of every cell, with the token `h` outside the raised set (peak of `a/(a + y + q²/(A_r - a)) - m₀`) and inside it
(`m₁ - m₀²/(m₀² + Y(A - Y))`), then `TV ≤ B`.

Code: `witcert_core.bounds.needle.bound`.
`python: TV <= needle_cells(32) and needle_sup() <= code("needle")` -/
theorem Cell.Sound.tv_le_needle {κ : Type v} {x : Cell α ι} (h : x.Sound) {i : ι} {l : List ι} {R μ A η Q : α}
    (hR : Rest x i l R μ A η Q) (hR0 : 0 ≤ R) (hμ : 0 < μ) (m₀ m₁ ā b s Y : κ → α) (B : α)
    (cover : ∀ m, 0 ≤ m → m ≤ μ → ∃ j, m₀ j ≤ m ∧ m ≤ m₁ j)
    (hB : ∀ j, NeedleCell μ A (μ * Q - η * η) R (x.w i / x.r i) x.A B (m₀ j) (m₁ j) (ā j) (b j) (s j) (Y j)) : x.TV ≤ B := by
  have hW : 0 ≤ μ * Q - η * η := by
    have cs := cauchy_schwarz_w h.w_nonneg (fun _ => 1) (fun t => x.r t - 1) l
    rw [sum_congr l (g := fun t => x.w t * (x.r t - 1)) (fun t => by ring), hR.η_eq,
      sum_congr l (f := fun t => x.w t * (1 * 1)) (g := x.w) (fun t => by ring), hR.mass, hR.Q_eq] at cs
    exact sub_nonneg cs
  have hy : 0 ≤ x.w i / x.r i := div_nonneg (h.w_nonneg i) (h.r_pos i)
  cases x.raised_isSet i with
  | inl hi => cases h.needle_outside_point hR hi with
    | intro m H => cases H with
      | intro a H => cases H with
        | intro v H => cases cover m H.1.m_nonneg H.1.m_le with
          | intro j hj =>
            have C := hB j
            have haā := H.1.le_of_admissible hW hR0 hμ hj.2 C.m₁_le C.admissible
            have hT0 : 0 ≤ x.TV + m₀ j := add_nonneg h.TV_nonneg C.m₀_nonneg
            have hT : (x.TV + m₀ j) * (a + (x.w i / x.r i + v)) ≤ a :=
              le_cert (add_nonneg (sub_nonneg H.2.2.2.2) (nonneg_mul (sub_nonneg hj.1) (le_of_lt H.2.2.2.1))) (by ring)
            cases C.outside with
            | inl c =>
              have k := needle_outside (le_trans H.1.a_nonneg H.1.a_le) H.1.a_nonneg H.1.a_le C.b_nonneg C.b_le hy (sub_nonneg C.m₁_le)
                (le_cert (sub_nonneg hj.2) (by ring)) C.s_nonneg C.s_sq
                (c.1.elim (fun d => Or.inl ⟨le_trans haā d.1, d.2⟩) Or.inr) hT0 H.2.1 H.2.2.2.1 H.2.2.1 hT
              have k2 := le_of_mul_le c.2.1 (le_trans (le_of_eq (mul_comm _ _)) (le_trans (le_trans k c.2.2) (le_of_eq (mul_comm _ _))))
              exact le_cert (sub_nonneg k2) (by ring)
            | inr c =>
              have hT1 : x.TV + m₀ j ≤ 1 := le_of_mul_le H.2.2.2.1 (le_cert (add_nonneg (sub_nonneg hT) (add_nonneg hy H.2.1)) (by ring))
              have k : (x.TV + m₀ j) * (b j + x.w i / x.r i) ≤ b j :=
                le_cert (add_nonneg (add_nonneg (sub_nonneg hT) (nonneg_mul hT0 H.2.1))
                  (nonneg_mul (sub_nonneg hT1) (sub_nonneg (le_trans haā c.1)))) (by ring)
              have k2 := le_of_mul_le c.2.1 (le_trans (le_of_eq (mul_comm _ _)) (le_trans (le_trans k c.2.2) (le_of_eq (mul_comm _ _))))
              exact le_cert (sub_nonneg k2) (by ring)
  | inr hi => cases h.needle_inside_point hR hi with
    | intro m H => cases H with
      | intro a H => cases cover m H.1.m_nonneg H.1.m_le with
        | intro j hj =>
          have C := hB j
          have haā := H.1.le_of_admissible hW hR0 hμ hj.2 C.m₁_le C.admissible
          have k := needle_inside C.m₀_nonneg hj.1 hj.2 (nonneg_mul H.1.a_nonneg (sub_nonneg H.2.1))
            (C.complement.elim (fun d => Or.inl ⟨le_trans haā d.1, d.2⟩) Or.inr) H.2.2.1 H.2.2.2.1 H.2.2.2.2
          cases C.inside with
          | inl c => exact le_of_mul_le c.1 (le_cert (add_nonneg (sub_nonneg k) (sub_nonneg c.2)) (by ring))
          | inr c => exact le_trans (le_of_sub_nonneg H.2.2.1) (le_trans hj.2 c)
end WitCert
