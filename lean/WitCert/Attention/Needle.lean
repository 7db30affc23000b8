import WitCert.Attention.Jensen
/-!
# The `needle` form

One token `h` is set apart (the heaviest, in the code; any token is allowed here). Either `h` is outside the raised
set, and then its own mass stays in the denominator, or it is inside, and the complement lives among the rest.
The rest has mass `μ = 1 - w_h`, `A_r = Σ_r w e^c`, `η_r`, `Q_r` and largest ratio `R_r`; `W = μ Q_r - η_r²` is `μ` times
the variance sum of the rest. This file has what holds at the true set; `NeedleCells` has the evaluation on intervals.
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

/-- What is known of a set of the rest: mass `m` and `u = Σ_S w (e^c - 1)`. -/
structure Reach (x : Cell α ι) (l : List ι) (μ η W R m u : α) : Prop where
  m_nonneg : 0 ≤ m
  m_le : m ≤ μ
  u_nonneg : 0 ≤ u
  u_le : u ≤ η
  u_le_max : u ≤ m * (R - 1)
  spread : (μ * u - m * η) * (μ * u - m * η) ≤ m * (μ - m) * W
  isSet : ∃ s, IsSet s ∧ sum (fun t => x.w t * s t) l = m ∧ sum (fun t => x.w t * (s t * (x.r t - 1))) l = u

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
    Reach x l μ η (μ * Q - η * η) R (sum (fun t => x.w t * s t) l) (sum (fun t => x.w t * (s t * (x.r t - 1))) l) := by
  have hm0 : 0 ≤ sum (fun t => x.w t * s t) l := sum_nonneg l (fun t => nonneg_mul (h.w_nonneg t) (hs.frac t).1)
  have hu0 : 0 ≤ sum (fun t => x.w t * (s t * (x.r t - 1))) l :=
    sum_nonneg l (fun t => nonneg_mul (h.w_nonneg t) (nonneg_mul (hs.frac t).1 (sub_nonneg (h.one_le_r t))))
  have hmax : sum (fun t => x.w t * (s t * (x.r t - 1))) l ≤ sum (fun t => x.w t * s t) l * (R - 1) := by
    refine le_trans (sum_le_all l (AllOf.imp l (q := fun t => x.w t * (s t * (x.r t - 1)) ≤ (R - 1) * (x.w t * s t)) (fun t ht => ?_) hR.le_R))
      (le_of_eq ((sum_mul (R - 1) _ l).trans (mul_comm _ _)))
    exact le_cert (nonneg_mul (nonneg_mul (h.w_nonneg t) (hs.frac t).1) (sub_nonneg ht)) (by ring)
  refine ⟨hm0, ?_, hu0, ?_, hmax, ?_, s, hs, rfl, rfl⟩
  · rw [← hR.mass]
    exact sum_le l (fun t => le_cert (nonneg_mul (h.w_nonneg t) (hs.frac t).2) (by ring))
  · rw [← hR.η_eq]
    exact sum_le l (fun t => le_cert (nonneg_mul (h.w_nonneg t) (nonneg_mul (hs.frac t).2 (sub_nonneg (h.one_le_r t)))) (by ring))
  · exact subset_spread h.w_nonneg hs (fun t => x.r t - 1) l hR.mass rfl hR.η_eq hR.Q_eq rfl (fun e => le_antisymm (by
      rw [e] at hmax
      exact le_trans hmax (le_of_eq (by ring))) hu0)
omit h in
theorem reach_sum (s : ι → α) (l : List ι) : sum (fun t => x.w t * (s t * x.r t)) l
    = sum (fun t => x.w t * s t) l + sum (fun t => x.w t * (s t * (x.r t - 1))) l := by
  rw [← sum_add]; exact sum_congr l (fun t => by ring)
omit h in
theorem rest_A {i : ι} {l : List ι} {R μ A η Q : α} (hR : Rest x i l R μ A η Q) : A = μ + η := by
  rw [← hR.A_eq, ← hR.mass, ← hR.η_eq, ← sum_add]; exact sum_congr l (fun t => by ring)

/-- **Outside.** If the front token `h` is not raised, some set of the rest has mass `m`, `u = Σ w (e^c - 1)`, `a = m + u`
and `TV + m ≤ a/(a + w_h e^{-c_h} + v)` with `v ≥ (μ - m)²/(A_r - a)`.

Code: `witcert_core.meter.bounds.needle._spared`.
`python: h_raised or any(spared_point(m, u) for m, u in rest_sets)` -/
theorem needle_outside_point {i : ι} {l : List ι} {R μ A η Q : α} (hR : Rest x i l R μ A η Q) (hi : x.raised i = 0) :
    ∃ m u, ∃ v, Reach x l μ η (μ * Q - η * η) R m u ∧ 0 ≤ v ∧ (μ - m) * (μ - m) ≤ v * (μ - m + (η - u)) ∧ 0 < m + u + (x.w i / x.r i + v) ∧
      (x.TV + m) * (m + u + (x.w i / x.r i + v)) ≤ m + u := by
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
      rw [← hR.A_eq, ← sum_sub]; exact sum_congr l (fun t => by ring), rest_A hR, reach_sum,
    sum_congr l (f := fun t => x.w t * (1 - x.raised t) * x.a t) (g := fun t => x.w t * ((1 - x.raised t) * x.a t)) (fun t => by ring)] at hq
  rw [reach_sum] at hUa
  have htv := at0.tv
  have hpos := at0.pos
  rw [em, eU, eV] at htv
  rw [eU, eV] at hpos
  revert hre hUa hU0 hV0 hq htv hpos
  generalize sum (fun t => x.w t * x.raised t) l = m
  generalize sum (fun t => x.w t * (x.raised t * (x.r t - 1))) l = u
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
  refine ⟨m, u, ya - y + V₀, hre, add_nonneg hya hV0, ?_, ?_, ?_⟩
  · exact le_cert (add_nonneg (sub_nonneg hq) (nonneg_mul hya (add_nonneg (sub_nonneg hre.m_le) (sub_nonneg hre.u_le)))) (by ring)
  · rw [e]; exact lt_of_lt_of_le hpos (le_cert (sub_nonneg hUa) (by ring))
  · rw [e]
    exact le_cert (nonneg_mul (sub_nonneg hUa) (sub_nonneg hT1)) (eq_lin htv (-1) (by ring))

/-- **Inside.** If the front token is raised, the complement is a set of the rest of mass `m` with `u`, and
`TV ≤ m N/(N + m)` with jensen's `N = mη + (1-2m)u + u(η-u)` for the whole cell's `η`.

Code: `witcert_core.meter.bounds.needle._refined` (`attacked`).
`python: not h_raised or any(attacked_point(m, u) for m, u in rest_sets)` -/
theorem needle_inside_point {i : ι} {l : List ι} {R μ A η Q : α} (hR : Rest x i l R μ A η Q) (hi : x.raised i = 1) :
    ∃ m u, Reach x l μ η (μ * Q - η * η) R m u ∧ u ≤ x.eta ∧ m ≤ 1 ∧ x.TV ≤ m ∧ x.TV * (jensenN x.eta m u + m) ≤ m * jensenN x.eta m u := by
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
  have hm1 : sum (fun t => x.w t * (1 - x.raised t)) l ≤ 1 := by
    have k := h.mean_nonneg (fun t => (hs.frac t).1)
    rw [em] at k
    exact le_cert k (by ring)
  have hue : sum (fun t => x.w t * ((1 - x.raised t) * (x.r t - 1))) l ≤ x.eta := by
    have e : x.mean (fun t => (1 - x.raised t) * (x.r t - 1)) = sum (fun t => x.w t * ((1 - x.raised t) * (x.r t - 1))) l := by
      rw [hR.mean_split, hi]; ring
    rw [← e]
    exact h.mean_le (fun t => le_cert (nonneg_mul (hs.frac t).1 (sub_nonneg (h.one_le_r t))) (by ring))
  rw [reach_sum, h.A_eq] at hU
  rw [reach_sum] at hq
  revert hre hq hU hU0 hV0 htv hpos hm1 hue
  generalize sum (fun t => x.w t * (1 - x.raised t)) l = m
  generalize sum (fun t => x.w t * ((1 - x.raised t) * (x.r t - 1))) l = u
  generalize sum (fun t => x.w t * ((1 - x.raised t) * x.a t)) l = V₀
  generalize x.mean (fun t => x.raised t * x.a t) = U₀
  intro hre hq hU hU0 hV0 htv hpos hm1 hue
  have e : (U₀ + V₀) * (m - x.TV) = V₀ := eq_lin htv (-1) (by ring)
  have p0 : 0 ≤ m - x.TV := nonneg_of_mul hpos (by rw [e]; exact hV0)
  have p1 : m - x.TV ≤ 1 := le_of_mul_le hpos (by rw [e]; exact le_cert hU0 (by ring))
  refine ⟨m, u, hre, hue, hm1, le_of_sub_nonneg p0, ?_⟩
  have k1 : 0 ≤ (1 - (m - x.TV)) * (V₀ * (m + u) - m * m) := nonneg_mul (sub_nonneg p1) (sub_nonneg hq)
  have k2 : 0 ≤ (m - x.TV) * ((m + u) * (1 + x.eta - (m + u) - U₀)) :=
    nonneg_mul p0 (nonneg_mul (add_nonneg hre.m_nonneg hre.u_nonneg) (sub_nonneg hU))
  show x.TV * (m * x.eta + (1 - 2 * m) * u + u * (x.eta - u) + m) ≤ m * (m * x.eta + (1 - 2 * m) * u + u * (x.eta - u))
  exact le_cert (add_nonneg k1 k2) (eq_lin e (m + u) (by ring))

/-- **needle, simple.** For any token `h`: `TV ≤ A_r/(A_r + w_h e^{-c_h})`, and this is never below `1 - w_h`, so the
maximum of the two that the code takes is its second term.

Code: `witcert_core.meter.bounds.needle._simple`.
`python: TV <= A_r / (A_r + w_h / r_h) and 1 - w_h <= A_r / (A_r + w_h / r_h)` -/
theorem tv_le_needle_simple {i : ι} {l : List ι} {R μ A η Q : α} (hR : Rest x i l R μ A η Q) :
    x.TV ≤ A / (A + x.w i / x.r i) ∧ 1 - x.w i ≤ A / (A + x.w i / x.r i) := by
  have hw : x.w i + μ = 1 := by
    rw [← h.w_sum, hR.split, ← hR.mass]; rfl
  have hη : 0 ≤ η := by
    rw [← hR.η_eq]; exact sum_nonneg l (fun t => nonneg_mul (h.w_nonneg t) (sub_nonneg (h.one_le_r t)))
  have hμ : 0 ≤ μ := by rw [← hR.mass]; exact sum_nonneg l h.w_nonneg
  have hA := rest_A hR
  have hy0 : 0 ≤ x.w i / x.r i := div_nonneg (h.w_nonneg i) (h.r_pos i)
  have hi := mul_inv_cancel (h.r_pos i)
  have hyw : x.w i / x.r i ≤ x.w i := div_le (h.r_pos i) (le_cert (nonneg_mul (h.w_nonneg i) (sub_nonneg (h.one_le_r i))) (by ring))
  have hd : 0 < A + x.w i / x.r i := by
    refine lt_of_lt_of_le (inv_pos (h.r_pos i)) (le_of_mul_le (h.r_pos i) ?_)
    exact le_cert (add_nonneg (nonneg_mul (le_of_lt (h.r_pos i)) hη) (nonneg_mul (sub_nonneg (h.one_le_r i)) hμ))
      (eq_lin3 hw hi hA 1 (x.w i - 1) (x.r i) (by ring))
  have h2 : 1 - x.w i ≤ A / (A + x.w i / x.r i) := by
    refine le_div hd ?_
    exact le_cert (add_nonneg (nonneg_mul hη (h.w_nonneg i)) (nonneg_mul hμ (sub_nonneg hyw)))
      (eq_lin2 hA hw (x.w i) (x.w i / x.r i) (by ring))
  refine ⟨?_, h2⟩
  cases x.raised_isSet i with
  | inl hi => cases h.needle_outside_point hR hi with
    | intro m H => cases H with
      | intro u H => cases H with
        | intro v H =>
          refine le_div hd ?_
          have hT1 : x.TV ≤ 1 := le_of_mul_le H.2.2.2.1 (le_cert (add_nonneg (add_nonneg (sub_nonneg H.2.2.2.2)
            (nonneg_mul H.1.m_nonneg (le_of_lt H.2.2.2.1))) (add_nonneg hy0 H.2.1)) (by ring))
          exact le_cert (add_nonneg (add_nonneg (sub_nonneg H.2.2.2.2) (nonneg_mul H.1.m_nonneg (le_of_lt H.2.2.2.1)))
            (add_nonneg (nonneg_mul h.TV_nonneg H.2.1) (nonneg_mul (add_nonneg (sub_nonneg H.1.m_le) (sub_nonneg H.1.u_le)) (sub_nonneg hT1))))
            (eq_lin hA (1 - x.TV) (by ring))
  | inr hi => cases h.needle_inside_point hR hi with
    | intro m H => cases H with
      | intro u H => exact le_trans (le_trans H.2.2.2.1 (le_trans H.1.m_le (le_cert (le_refl 0) (eq_lin hw (-1) (by ring))))) h2
end Cell.Sound
end WitCert
