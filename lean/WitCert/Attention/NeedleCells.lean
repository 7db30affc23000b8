import WitCert.Attention.Needle
/-!
# `needle` on intervals, as the code evaluates it

The rest has mass `μ`; a set of it has mass `m ∈ [m₀, m₁]` and `u ≤ cap`. With `b = μ - m₀`, `e = η_r - u`, `t = b + e`:
* `h` attacked: `m₁ N̄/(m₁ + N̄)` with jensen's `N̄` on the interval;
* `h` spared: the gain is at most `N(t)/D(t)`, `N(t) = P t - k t² - m₁ b²`, `D(t) = R t - t² + b²`, `k = 1 - m₀`. It is
  largest at an end of the range of `t` or at the first root of `L t² - 2M t + C`.
-/
set_option synthInstance.maxSize 4000
universe u v
namespace WitCert
variable {α : Type u} [OrderedField α]

/-! ### The quotient of two quadratics -/
section
variable (k P R h b : α)
def sparedN (t : α) : α := P * t - k * (t * t) - h * (b * b)
def sparedD (t : α) : α := R * t - t * t + b * b
/-- Coefficients `L`, `M`, `C` of the slope `L t² - 2M t + C`. -/
def slopeL : α := P - k * R
def slopeM : α := (k + h) * (b * b)
def slopeC : α := (P + h * R) * (b * b)
/-- The slope, polarised. -/
def slopeK (x y : α) : α := slopeL k P R * (x * y) - slopeM k h b * (x + y) + slopeC P R h b

theorem spared_cross (x y : α) :
    sparedN k P h b y * sparedD R b x - sparedN k P h b x * sparedD R b y = (y - x) * slopeK k P R h b x y := by
  show (P * y - k * (y * y) - h * (b * b)) * (R * x - x * x + b * b) - (P * x - k * (x * x) - h * (b * b)) * (R * y - y * y + b * b)
    = (y - x) * ((P - k * R) * (x * y) - (k + h) * (b * b) * (x + y) + (P + h * R) * (b * b))
  ring
variable {k P R h b}
/-- `x ≤ y` and a nonnegative slope between them: the value at `y` is larger. -/
theorem spared_up {x y B : α} (hxy : 0 ≤ (y - x) * slopeK k P R h b x y) (hD : 0 < sparedD R b y) (hDx : 0 ≤ sparedD R b x)
    (hB : sparedN k P h b y ≤ B * sparedD R b y) : sparedN k P h b x ≤ B * sparedD R b x := by
  have c := spared_cross k P R h b x y
  refine le_of_mul_le hD ?_
  exact le_cert (add_nonneg hxy (nonneg_mul hDx (sub_nonneg hB))) (eq_lin c 1 (by ring))

/-- **The root of the code.** With `ρ² = M² - L C`, `ρ ≥ 0`, the number `t₀ = C/(M + ρ)` is the first root of the slope
`L t² - 2M t + C`, in the sense that `spared_three` needs.

Code: `witcert_core.meter.bounds.needle._spared` (`b * tail / (middle + root)`).
`python: all(slope_at_root(*interval(j, 4)) <= tiny for j in range(4))` -/
theorem spared_root {L M C ρ : α} (hρ : 0 ≤ ρ) (hp : 0 < M + ρ) (hroot : ρ * ρ = M * M - L * C) :
    L * (C / (M + ρ) * (C / (M + ρ))) - M * (C / (M + ρ) + C / (M + ρ)) + C = 0 ∧ L * (C / (M + ρ)) ≤ M := by
  have e : C / (M + ρ) * (M + ρ) = C := div_mul_cancel hp
  generalize C / (M + ρ) = t at e
  constructor
  · refine le_antisymm (le_of_mul_le (mul_pos hp hp) (le_of_eq ?_)) (le_of_mul_le (mul_pos hp hp) (le_of_eq (Eq.symm ?_)))
    all_goals exact eq_lin2 e hroot (L * (t * (M + ρ) + C) - 2 * M * (M + ρ)) C (by ring)
  · refine le_of_mul_le hp (le_cert (nonneg_mul hρ (le_of_lt hp)) ?_)
    exact eq_lin2 e hroot (-L) (-1) (by ring)

/-- **Three candidates suffice.** On `[lo, hi]` the quotient `N/D` is at most `B` if it is so at both ends and at the
clipped root `c`: `c = hi` if the first root is at or beyond `hi`, `c = lo` if at or before `lo`, else the root itself; or
there is no root at all (`M² < L C`).

Code: `witcert_core.meter.bounds.needle._spared` (`gain(eta_r)`, `gain(e_min)`, `gain(inside)`).
`python: all(spared(*interval(j, 4), lo + x * (hi - lo)) <= max(spared_candidates(*interval(j, 4))) * (1 + tiny) for j in range(4) for lo, hi in [spared_range(*interval(j, 4))] for x in shares)` -/
theorem spared_three {lo hi t₀ B : α} (hkh : 0 ≤ k + h) (hlo : 0 ≤ lo) (hD : ∀ t, lo ≤ t → t ≤ hi → 0 < sparedD R b t)
    (hF : 0 ≤ P + h * R - (k + h) * hi) (hlh : lo ≤ hi)
    (root : (slopeK k P R h b t₀ t₀ = 0 ∧ slopeL k P R * t₀ ≤ slopeM k h b) ∨ slopeM k h b * slopeM k h b < slopeL k P R * slopeC P R h b)
    (b_lo : sparedN k P h b lo ≤ B * sparedD R b lo) (b_hi : sparedN k P h b hi ≤ B * sparedD R b hi)
    (b_root : lo ≤ t₀ → t₀ ≤ hi → sparedN k P h b t₀ ≤ B * sparedD R b t₀) :
    ∀ t, lo ≤ t → t ≤ hi → sparedN k P h b t ≤ B * sparedD R b t := by
  intro t h0 h1
  have hDt := hD t h0 h1
  have hDhi := hD hi hlh (le_refl hi)
  have hDlo := hD lo (le_refl lo) hlh
  have hM : 0 ≤ slopeM k h b := nonneg_mul hkh (sq_nonneg b)
  have hbb : 0 ≤ b * b := sq_nonneg b
  have ht0 : 0 ≤ t := le_trans hlo h0
  -- K is affine in each argument
  have aff : ∀ x y z : α, slopeK k P R h b x z = slopeK k P R h b x y + (slopeL k P R * x - slopeM k h b) * (z - y) := fun x y z => by
    show slopeL k P R * (x * z) - slopeM k h b * (x + z) + slopeC P R h b = slopeL k P R * (x * y) - slopeM k h b * (x + y) + slopeC P R h b + (slopeL k P R * x - slopeM k h b) * (z - y)
    ring
  have symmK : ∀ x y : α, slopeK k P R h b x y = slopeK k P R h b y x := fun x y => by
    show slopeL k P R * (x * y) - slopeM k h b * (x + y) + slopeC P R h b = slopeL k P R * (y * x) - slopeM k h b * (y + x) + slopeC P R h b
    ring
  cases le_total (slopeM k h b) (slopeL k P R * t) with
  | inl c =>
    -- L t ≥ M: the right end is better, since C - M t ≥ 0
    refine spared_up (y := hi) ?_ hDhi (le_of_lt hDt) b_hi
    refine nonneg_mul (sub_nonneg h1) ?_
    have f : 0 ≤ slopeC P R h b - slopeM k h b * t := nonneg_cert
      (nonneg_mul hbb (add_nonneg hF (nonneg_mul hkh (sub_nonneg h1))))
      (show (P + h * R) * (b * b) - (k + h) * (b * b) * t = b * b * (P + h * R - (k + h) * hi + (k + h) * (hi - t)) from by ring)
    exact nonneg_cert (add_nonneg f (nonneg_mul (le_trans ht0 h1) (sub_nonneg c))) (by
      show slopeL k P R * (t * hi) - slopeM k h b * (t + hi) + slopeC P R h b = _
      ring)
  | inr c =>
    have hc : 0 ≤ slopeM k h b - slopeL k P R * t := sub_nonneg c
    cases le_total (slopeM k h b) (slopeL k P R * hi) with
    | inl d =>
      -- at t the value is at most k, at hi at least k
      have n1 : sparedN k P h b t ≤ k * sparedD R b t := le_cert hc (by
        show k * (R * t - t * t + b * b) - (P * t - k * (t * t) - h * (b * b)) = (k + h) * (b * b) - (P - k * R) * t
        ring)
      have n2 : k * sparedD R b hi ≤ sparedN k P h b hi := le_cert (sub_nonneg d) (by
        show P * hi - k * (hi * hi) - h * (b * b) - k * (R * hi - hi * hi + b * b) = (P - k * R) * hi - (k + h) * (b * b)
        ring)
      have n3 : k ≤ B := le_of_mul_le hDhi (le_trans (le_of_eq (mul_comm _ _)) (le_trans (le_trans n2 b_hi) (le_of_eq (mul_comm _ _))))
      exact le_trans n1 (mul_le_mul_right (le_of_lt hDt) n3)
    | inr d =>
      have hd : 0 ≤ slopeM k h b - slopeL k P R * hi := sub_nonneg d
      cases root with
      | inr r =>
        -- no root: the slope is positive up to hi
        refine spared_up (y := hi) ?_ hDhi (le_of_lt hDt) b_hi
        refine nonneg_mul (sub_nonneg h1) ?_
        have hL : 0 < slopeL k P R := by
          cases le_or_lt (slopeL k P R) 0 with
          | inr p => exact p
          | inl p =>
            exfalso
            have hC : 0 ≤ slopeC P R h b := nonneg_cert (nonneg_mul hbb (add_nonneg hF (nonneg_mul hkh (le_trans ht0 h1))))
              (show (P + h * R) * (b * b) = b * b * (P + h * R - (k + h) * hi + (k + h) * hi) from by ring)
            have q : slopeL k P R * slopeC P R h b ≤ 0 := le_cert (nonneg_mul (sub_nonneg p) hC) (by ring)
            exact r (le_trans q (sq_nonneg (slopeM k h b)))
        have khh : 0 ≤ slopeK k P R h b hi hi := by
          refine nonneg_of_mul hL (nonneg_cert (add_nonneg (sq_nonneg (slopeM k h b - slopeL k P R * hi)) (sub_nonneg (le_of_lt r))) ?_)
          show slopeL k P R * (slopeL k P R * (hi * hi) - slopeM k h b * (hi + hi) + slopeC P R h b) = _
          ring
        rw [symmK t hi, aff hi hi t]
        exact nonneg_cert (add_nonneg khh (nonneg_mul hd (sub_nonneg h1))) (by ring)
      | inl r =>
        have hr : 0 ≤ slopeM k h b - slopeL k P R * t₀ := sub_nonneg r.2
        -- on either side of the root
        have left : ∀ x y : α, y ≤ t₀ → x ≤ y → 0 ≤ slopeM k h b - slopeL k P R * y → 0 ≤ slopeK k P R h b x y := fun x y hy hxy hly => by
          have a1 := aff t₀ t₀ y
          have a2 := aff y t₀ x
          rw [r.1] at a1
          rw [symmK x y, a2, symmK y t₀, a1]
          exact nonneg_cert (add_nonneg (nonneg_mul hr (sub_nonneg hy)) (nonneg_mul hly (sub_nonneg (le_trans hxy hy)))) (by ring)
        have right : ∀ x y : α, t₀ ≤ x → x ≤ y → 0 ≤ slopeM k h b - slopeL k P R * x → 0 ≤ (x - y) * slopeK k P R h b y x := fun x y hx hxy hlx => by
          have a1 := aff t₀ t₀ x
          have a2 := aff x t₀ y
          rw [r.1] at a1
          rw [symmK y x, a2, symmK x t₀, a1]
          exact nonneg_cert (nonneg_mul (sub_nonneg hxy) (add_nonneg (nonneg_mul hr (sub_nonneg hx)) (nonneg_mul hlx (sub_nonneg (le_trans hx hxy))))) (by ring)
        cases le_total t₀ hi with
        | inr e =>
          -- the root is beyond hi
          exact spared_up (y := hi) (nonneg_mul (sub_nonneg h1) (left t hi e h1 hd)) hDhi (le_of_lt hDt) b_hi
        | inl e => cases le_total lo t₀ with
          | inr f =>
            -- the root is before lo
            have hlo2 : 0 ≤ slopeM k h b - slopeL k P R * lo := by
              cases le_total 0 (slopeL k P R) with
              | inl p => exact nonneg_cert (add_nonneg hc (nonneg_mul p (sub_nonneg h0))) (by ring)
              | inr p => exact nonneg_cert (add_nonneg hM (nonneg_mul (sub_nonneg p) hlo)) (by ring)
            exact spared_up (y := lo) (right lo t f h0 hlo2) hDlo (le_of_lt hDt) b_lo
          | inl f =>
            have hDr := hD t₀ f e
            cases le_total t t₀ with
            | inl g => exact spared_up (y := t₀) (nonneg_mul (sub_nonneg g) (left t t₀ (le_refl _) g hr)) hDr (le_of_lt hDt) (b_root f e)
            | inr g => exact spared_up (y := t₀) (right t₀ t (le_refl _) g hr) hDr (le_of_lt hDt) (b_root f e)
end

/-! ### From the true set to an interval -/

/-- `h` spared: from the point of `needle_outside_point` to `N(t) ≤ …` on the interval, at `t = b + (η - u)`. -/
theorem spared_interval {T μ η m u v y ph m₀ m₁ : α} (hT : 0 ≤ T) (hm0 : m₀ ≤ m) (hm1 : m ≤ m₁) (hmm : 0 ≤ m) (hmμ : m ≤ μ)
    (hu : 0 ≤ u) (huη : u ≤ η) (hμ1 : ph + μ = 1) (hyp : y ≤ ph) (hb : 0 < μ - m₀)
    (hv0 : 0 ≤ v) (hv : (μ - m) * (μ - m) ≤ v * (μ - m + (η - u))) (hg : (T + m) * (m + u + (y + v)) ≤ m + u) :
    T * sparedD (y + m₀ + (μ - m₀) + η) (μ - m₀) (μ - m₀ + (η - u))
      ≤ sparedN (1 - m₀) ((1 - m₀) * (μ - m₀ + η) + m₁ * (ph - y + (μ - m₀))) m₁ (μ - m₀) (μ - m₀ + (η - u)) := by
  have he := sub_nonneg huη
  have ht : 0 ≤ μ - m₀ + (η - u) := add_nonneg (le_of_lt hb) he
  -- (b - v) t ≤ b₁ e, with b = μ - m and b₁ = μ - m₀
  have star : (μ - m - v) * (μ - m₀ + (η - u)) ≤ (μ - m₀) * (η - u) := by
    cases le_or_lt (μ - m + (η - u)) 0 with
    | inl z =>
      have hbm := sub_nonneg hmμ
      have e1 : μ - m = 0 := le_antisymm (le_trans (le_cert he (by ring)) z) hbm
      have e2 : η - u = 0 := le_antisymm (le_trans (le_cert hbm (by ring)) z) he
      rw [e1, e2]
      exact le_cert (nonneg_mul hv0 (le_of_lt hb)) (by ring)
    | inr p =>
      refine le_of_mul_le p ?_
      exact le_cert (add_nonneg (nonneg_mul ht (sub_nonneg hv)) (nonneg_mul (nonneg_mul he he) (sub_nonneg hm0))) (by ring)
  have h1 : 0 ≤ (μ - m₀ + (η - u)) * (m + u - (T + m) * (m + u + (y + v))) := nonneg_mul ht (sub_nonneg hg)
  have h2 : 0 ≤ (T + m) * ((μ - m₀) * (η - u) - (μ - m - v) * (μ - m₀ + (η - u))) := nonneg_mul (add_nonneg hT hmm) (sub_nonneg star)
  have h3 : 0 ≤ (m₁ - m) * ((ph - y) * (μ - m₀ + (η - u)) + (μ - m₀) * (η - u)) :=
    nonneg_mul (sub_nonneg hm1) (add_nonneg (nonneg_mul (sub_nonneg hyp) ht) (nonneg_mul (le_of_lt hb) he))
  have h4 : 0 ≤ (m - m₀) * (u * (μ - m₀ + (η - u))) := nonneg_mul (sub_nonneg hm0) (nonneg_mul hu ht)
  show T * ((y + m₀ + (μ - m₀) + η) * (μ - m₀ + (η - u)) - (μ - m₀ + (η - u)) * (μ - m₀ + (η - u)) + (μ - m₀) * (μ - m₀))
    ≤ ((1 - m₀) * (μ - m₀ + η) + m₁ * (ph - y + (μ - m₀))) * (μ - m₀ + (η - u)) - (1 - m₀) * ((μ - m₀ + (η - u)) * (μ - m₀ + (η - u))) - m₁ * ((μ - m₀) * (μ - m₀))
  exact le_cert (add_nonneg (add_nonneg h1 h2) (add_nonneg h3 h4))
    (eq_lin hμ1 (m * (μ - m₀ + (η - u))) (by ring))

/-- Outward rounding of `y` and `f` in the spared bound. -/
theorem outward_step {T y₀ y f₀ f η m₀ m₁ μ k t : α}
    (g : T * sparedD (y₀ + m₀ + (μ - m₀) + η) (μ - m₀) t ≤ sparedN k (k * (μ - m₀ + η) + m₁ * (f₀ + (μ - m₀))) m₁ (μ - m₀) t)
    (k1 : 0 ≤ T * ((y₀ - y) * t)) (k2 : 0 ≤ m₁ * ((f - f₀) * t)) :
    T * sparedD (y + m₀ + (μ - m₀) + η) (μ - m₀) t ≤ sparedN k (k * (μ - m₀ + η) + m₁ * (f + (μ - m₀))) m₁ (μ - m₀) t :=
  le_cert (add_nonneg (add_nonneg (sub_nonneg g) k1) k2) (by
    show (k * (μ - m₀ + η) + m₁ * (f + (μ - m₀))) * t - k * (t * t) - m₁ * ((μ - m₀) * (μ - m₀)) - T * ((y + m₀ + (μ - m₀) + η) * t - t * t + (μ - m₀) * (μ - m₀))
      = (k * (μ - m₀ + η) + m₁ * (f₀ + (μ - m₀))) * t - k * (t * t) - m₁ * ((μ - m₀) * (μ - m₀)) - T * ((y₀ + m₀ + (μ - m₀) + η) * t - t * t + (μ - m₀) * (μ - m₀))
        + T * ((y₀ - y) * t) + m₁ * ((f - f₀) * t)
    ring)

/-- `h` attacked: `T ≤ m₁ N̄/(m₁ + N̄)` with `N̄ = m₁η + (1-2m₀)ū + ū(η-ū)`, `ū = min(cap, (1 - 2m₀ + η)/2)`. -/
theorem attacked_interval {T η m u m₀ m₁ cap : α} (hm : 0 ≤ m) (hm1 : m ≤ 1) (hη : 0 ≤ η) (hu : 0 ≤ u) (huη : u ≤ η) (hcap : u ≤ cap)
    (h0 : m₀ ≤ m) (h1 : m ≤ m₁) (hTm : T ≤ m) (hT : T * (jensenN η m u + m) ≤ m * jensenN η m u) :
    T * ((m₁ * η + (1 - 2 * m₀) * min cap ((1 - 2 * m₀ + η) / 2) + min cap ((1 - 2 * m₀ + η) / 2) * (η - min cap ((1 - 2 * m₀ + η) / 2))) + m₁)
      ≤ m₁ * (m₁ * η + (1 - 2 * m₀) * min cap ((1 - 2 * m₀ + η) / 2) + min cap ((1 - 2 * m₀ + η) / 2) * (η - min cap ((1 - 2 * m₀ + η) / 2))) := by
  have hN : 0 ≤ jensenN η m u := by
    -- N = (m + u)(1 - m + η - u) - m(1 - m)
    refine nonneg_cert (add_nonneg (add_nonneg (nonneg_mul hm (sub_nonneg huη)) (nonneg_mul hu (sub_nonneg hm1))) (nonneg_mul hu (sub_nonneg huη))) ?_
    show m * η + (1 - 2 * m) * u + u * (η - u) = _
    ring
  have hle : jensenN η m u ≤ m₁ * η + (1 - 2 * m₀) * min cap ((1 - 2 * m₀ + η) / 2) + min cap ((1 - 2 * m₀ + η) / 2) * (η - min cap ((1 - 2 * m₀ + η) / 2)) :=
    jensenN_le_cell hη hu hcap h0 h1
  generalize m₁ * η + (1 - 2 * m₀) * min cap ((1 - 2 * m₀ + η) / 2) + min cap ((1 - 2 * m₀ + η) / 2) * (η - min cap ((1 - 2 * m₀ + η) / 2)) = N' at hle
  generalize jensenN η m u = N at hN hle hT
  have hm1' : 0 ≤ m₁ := le_trans hm h1
  have hN' : 0 ≤ N' := le_trans hN hle
  cases le_or_lt (N + m) 0 with
  | inl z =>
    -- N = m = 0, so T ≤ 0
    have e : m = 0 := le_antisymm (le_trans (le_cert hN (by ring)) z) hm
    rw [e] at hTm
    exact le_cert (add_nonneg (nonneg_mul hm1' hN') (nonneg_mul (sub_nonneg hTm) (add_nonneg hN' hm1'))) (by ring)
  | inr p =>
    refine le_of_mul_le p ?_
    have k1 : 0 ≤ (N' + m₁) * (m * N - T * (N + m)) := nonneg_mul (add_nonneg hN' hm1') (sub_nonneg hT)
    have k2 : 0 ≤ (m₁ - m) * (N * N') := nonneg_mul (sub_nonneg h1) (nonneg_mul hN hN')
    have k3 : 0 ≤ m * m₁ * (N' - N) := nonneg_mul (nonneg_mul hm hm1') (sub_nonneg hle)
    exact le_cert (add_nonneg k1 (add_nonneg k2 k3)) (by ring)

/-- What the code computes in one interval `[m₀, m₁]`: `η` of the rest, `y ≤ w_h e^{-c_h}` and `f ≥ w_h(1 - e^{-c_h})`, `η'` of the
whole cell, `cap` an upper bound on `u`; `B` is at least the value of both alternatives. The `spared` bound is asked for every
`t`; three suffice (`spared_three`). -/
structure NeedleValue (μ η y f η' B m₀ m₁ cap : α) : Prop where
  low : m₀ < μ
  low_nonneg : 0 ≤ m₀
  spared : ∀ t, μ - m₀ + (η - cap) ≤ t → μ - m₀ ≤ t → t ≤ μ - m₀ + η →
    sparedN (1 - m₀) ((1 - m₀) * (μ - m₀ + η) + m₁ * (f + (μ - m₀))) m₁ (μ - m₀) t ≤ B * sparedD (y + m₀ + (μ - m₀) + η) (μ - m₀) t
  attacked : ∀ N, N = m₁ * η' + (1 - 2 * m₀) * min cap ((1 - 2 * m₀ + η') / 2) + min cap ((1 - 2 * m₀ + η') / 2) * (η' - min cap ((1 - 2 * m₀ + η') / 2)) →
    m₁ * N ≤ B * (N + m₁) ∧ 0 < N + m₁

/-- The same with the code's `cap`: `W` of the rest and `R` its largest `e^c`. -/
structure NeedleCell (μ η W R y f η' B m₀ m₁ cap : α) : Prop where
  value : NeedleValue μ η y f η' B m₀ m₁ cap
  high : m₁ ≤ μ
  cap_ok : η ≤ cap ∨ m₁ * (R - 1) ≤ cap ∨ ∃ s, 0 ≤ s ∧ m₁ * (μ - m₁) * W ≤ s * s ∧ m₁ * η + s ≤ μ * cap

/-- The code's `cap` bounds `u` for every set of the rest of mass at most `m₁`. -/
theorem Cell.Sound.needle_cap {ι : Type v} {x : Cell α ι} (h : x.Sound) {i : ι} {l : List ι} {R μ A η₀ Q : α}
    (hR : Rest x i l R μ A η₀ Q) (hR1 : 1 ≤ R) (hμ : 0 < μ) {η W m₁ cap : α} (hη : η₀ ≤ η) (hW : μ * Q - η₀ * η₀ ≤ W) (high : m₁ ≤ μ)
    (cap_ok : η ≤ cap ∨ m₁ * (R - 1) ≤ cap ∨ ∃ s, 0 ≤ s ∧ m₁ * (μ - m₁) * W ≤ s * s ∧ m₁ * η + s ≤ μ * cap)
    {s : ι → α} (hs : IsSet s) (h1 : sum (fun t => x.w t * s t) l ≤ m₁) : sum (fun t => x.w t * (s t * (x.r t - 1))) l ≤ cap := by
  have hW0 : 0 ≤ μ * Q - η₀ * η₀ := by
    have cs := cauchy_schwarz_w h.w_nonneg (fun _ => 1) (fun t => x.r t - 1) l
    rw [sum_congr l (g := fun t => x.w t * (x.r t - 1)) (fun t => by ring), hR.η_eq,
      sum_congr l (f := fun t => x.w t * (1 * 1)) (g := x.w) (fun t => by ring), hR.mass, hR.Q_eq] at cs
    exact sub_nonneg cs
  have k := h.reach hR hs
  have hm1 := le_trans k.m_nonneg h1
  cases cap_ok with
  | inl c => exact le_trans k.u_le (le_trans hη c)
  | inr c => cases c with
    | inl c => exact le_trans k.u_le_max (le_trans (mul_le_mul_right (sub_nonneg hR1) h1) c)
    | inr c => cases c with
      | intro s c =>
        have hs := le_trans (mul_le_mul_left (nonneg_mul hm1 (sub_nonneg high)) hW) c.2.1
        have sm := spread_mono k.m_nonneg h1 high k.u_le hW0 c.1 hs k.spread
        exact le_of_mul_le hμ (le_cert (add_nonneg (add_nonneg (sub_nonneg sm) (nonneg_mul hm1 (sub_nonneg hη))) (sub_nonneg c.2.2)) (by ring))

/-- needle from any caps of `u` on the intervals. -/
theorem Cell.Sound.tv_le_needle_caps {ι κ : Type v} {x : Cell α ι} (h : x.Sound) {i : ι} {l : List ι} {R μ A η₀ Q : α}
    (hR : Rest x i l R μ A η₀ Q) {η y f η' : α} (hη : η₀ ≤ η)
    (hy0 : 0 ≤ y) (hy : y ≤ x.w i / x.r i) (hf : x.w i - x.w i / x.r i ≤ f) (hη' : x.eta ≤ η') (m₀ m₁ cap : κ → α) (B : α)
    (cover : ∀ m, 0 ≤ m → m ≤ μ → ∃ j, m₀ j ≤ m ∧ m ≤ m₁ j)
    (caps : ∀ j s, IsSet s → sum (fun t => x.w t * s t) l ≤ m₁ j → sum (fun t => x.w t * (s t * (x.r t - 1))) l ≤ cap j)
    (hB : ∀ j, NeedleValue μ η y f η' B (m₀ j) (m₁ j) (cap j)) : x.TV ≤ B := by
  have hw : x.w i + μ = 1 := by
    rw [← h.w_sum, hR.split, ← hR.mass]; rfl
  have hyp : x.w i / x.r i ≤ x.w i := div_le (h.r_pos i) (le_cert (nonneg_mul (h.w_nonneg i) (sub_nonneg (h.one_le_r i))) (by ring))
  have hcap : ∀ {m u : α} (j : κ), Reach x l μ η₀ (μ * Q - η₀ * η₀) R m u → m ≤ m₁ j → u ≤ cap j := fun j k h1 => by
    cases k.isSet with
    | intro s S =>
      have c := caps j s S.1 (by rw [S.2.1]; exact h1)
      rw [S.2.2] at c
      exact c
  cases x.raised_isSet i with
  | inl hi => cases h.needle_outside_point hR hi with
    | intro m H => cases H with
      | intro u H => cases H with
        | intro v H => cases cover m H.1.m_nonneg H.1.m_le with
          | intro j hj =>
            have C := hB j
            have hb := pos_of_sub C.low
            have huη : u ≤ η := le_trans H.1.u_le hη
            have ht : 0 ≤ μ - m₀ j + (η - u) := add_nonneg (le_of_lt hb) (sub_nonneg huη)
            have hv : (μ - m) * (μ - m) ≤ v * (μ - m + (η - u)) :=
              le_trans H.2.2.1 (mul_le_mul_left H.2.1 (le_cert (sub_nonneg hη) (by ring)))
            have g := spared_interval h.TV_nonneg hj.1 hj.2 H.1.m_nonneg H.1.m_le H.1.u_nonneg huη hw hyp hb H.2.1 hv H.2.2.2.2
            have c := C.spared (μ - m₀ j + (η - u)) (le_cert (sub_nonneg (hcap j H.1 hj.2)) (by ring)) (le_cert (sub_nonneg huη) (by ring)) (le_cert H.1.u_nonneg (by ring))
            -- D > 0, and rounding outward makes D smaller and N larger
            have hD : 0 < sparedD (y + m₀ j + (μ - m₀ j) + η) (μ - m₀ j) (μ - m₀ j + (η - u)) := by
              refine lt_of_lt_of_le (mul_pos hb hb) (le_cert (nonneg_mul (add_nonneg (add_nonneg hy0 C.low_nonneg) H.1.u_nonneg) ht) ?_)
              show (y + m₀ j + (μ - m₀ j) + η) * (μ - m₀ j + (η - u)) - (μ - m₀ j + (η - u)) * (μ - m₀ j + (η - u)) + (μ - m₀ j) * (μ - m₀ j) - (μ - m₀ j) * (μ - m₀ j) = _
              ring
            have k1 : 0 ≤ x.TV * ((x.w i / x.r i - y) * (μ - m₀ j + (η - u))) := nonneg_mul h.TV_nonneg (nonneg_mul (sub_nonneg hy) ht)
            have k2 : 0 ≤ m₁ j * ((f - (x.w i - x.w i / x.r i)) * (μ - m₀ j + (η - u))) :=
              nonneg_mul (le_trans H.1.m_nonneg hj.2) (nonneg_mul (sub_nonneg hf) ht)
            have g2 : x.TV * sparedD (y + m₀ j + (μ - m₀ j) + η) (μ - m₀ j) (μ - m₀ j + (η - u))
                ≤ sparedN (1 - m₀ j) ((1 - m₀ j) * (μ - m₀ j + η) + m₁ j * (f + (μ - m₀ j))) (m₁ j) (μ - m₀ j) (μ - m₀ j + (η - u)) :=
              outward_step g k1 k2
            exact le_of_mul_le hD (le_trans (le_of_eq (mul_comm _ _)) (le_trans (le_trans g2 c) (le_of_eq (mul_comm _ _))))
  | inr hi => cases h.needle_inside_point hR hi with
    | intro m H => cases H with
      | intro u H => cases cover m H.1.m_nonneg H.1.m_le with
        | intro j hj =>
          have C := hB j
          have hup : jensenN x.eta m u ≤ jensenN η' m u := le_cert
            (add_nonneg (nonneg_mul H.1.m_nonneg (sub_nonneg hη')) (nonneg_mul H.1.u_nonneg (sub_nonneg hη'))) (by
              show m * η' + (1 - 2 * m) * u + u * (η' - u) - (m * x.eta + (1 - 2 * m) * u + u * (x.eta - u)) = _
              ring)
          have hT : x.TV * (jensenN η' m u + m) ≤ m * jensenN η' m u :=
            le_cert (add_nonneg (sub_nonneg H.2.2.2.2) (nonneg_mul (sub_nonneg H.2.2.2.1) (sub_nonneg hup))) (by ring)
          have g := attacked_interval H.1.m_nonneg H.2.2.1 (le_trans h.eta_nonneg hη') H.1.u_nonneg (le_trans H.2.1 hη') (hcap j H.1 hj.2) hj.1 hj.2 H.2.2.2.1 hT
          have c := C.attacked _ rfl
          exact le_of_mul_le c.2 (le_trans (le_of_eq (mul_comm _ _)) (le_trans (le_trans g c.1) (le_of_eq (mul_comm _ _))))

/-- **needle, refined.** Intervals `[m₀ j, m₁ j]` cover the masses `[0, μ]` of the rest; if `B` is at least the code's value on
every interval, with `h` attacked (`m₁ N̄/(m₁ + N̄)`) and with `h` spared (the largest `N(t)/D(t)`), then `TV ≤ B`, for
accumulators rounded outward: `η`, `W`, `η'` up, `y = w_h e^{-c_h}` down, `f = w_h(1 - e^{-c_h})` up.

Code: `witcert_core.meter.bounds.needle.bound`, `witcert_core.meter.bounds.needle._refined`.
`python: TV <= needle_intervals(16) and TV <= code("needle")` -/
theorem Cell.Sound.tv_le_needle {ι κ : Type v} {x : Cell α ι} (h : x.Sound) {i : ι} {l : List ι} {R μ A η₀ Q : α}
    (hR : Rest x i l R μ A η₀ Q) (hR1 : 1 ≤ R) (hμ : 0 < μ) {η W y f η' : α} (hη : η₀ ≤ η) (hW : μ * Q - η₀ * η₀ ≤ W)
    (hy0 : 0 ≤ y) (hy : y ≤ x.w i / x.r i) (hf : x.w i - x.w i / x.r i ≤ f) (hη' : x.eta ≤ η') (m₀ m₁ cap : κ → α) (B : α)
    (cover : ∀ m, 0 ≤ m → m ≤ μ → ∃ j, m₀ j ≤ m ∧ m ≤ m₁ j)
    (hB : ∀ j, NeedleCell μ η W R y f η' B (m₀ j) (m₁ j) (cap j)) : x.TV ≤ B := by
  exact h.tv_le_needle_caps hR hη hy0 hy hf hη' m₀ m₁ cap B cover
    (fun j _ hs h1 => h.needle_cap hR hR1 hμ hη hW (hB j).high (hB j).cap_ok hs h1) (fun j => (hB j).value)

/-- **needle with something to spare.** Of the rest only `e^{c_t} ≤ g_t + μ' x_t` is known, with `x ≥ 0` and `Σ w x ≤ 1`; the heaviest token
has a radius of its own. `η`, `η'` and the caps of `u`, taken from `g`, grow by `μ'` once, and `TV ≤ B` as in `needle`.

Code: `witcert_core.meter.bounds.needle.bound_fields` (`Fields.spare`), `witcert_core.meter.bounds.joint.bound`.
`python: TV <= spared_rest.needle_intervals(16) and TV <= spared_rest.code("needle")` -/
theorem Cell.Sound.tv_le_needle_spare {ι κ : Type v} {x : Cell α ι} (h : x.Sound) {i : ι} {l : List ι} {R' R μ A η₀ Q A' η₁ Q' : α}
    (hR : Rest x i l R' μ A η₀ Q) {g ξ : ι → α} {μ' : α} (hμ' : 0 ≤ μ') (hg : ∀ t, 1 ≤ g t) (hξ0 : ∀ t, 0 ≤ ξ t)
    (hξ : sum (fun t => x.w t * ξ t) l ≤ 1) (hr : ∀ t, x.r t ≤ g t + μ' * ξ t)
    (hG : Rest (Cell.mk x.l x.w g (fun _ => 1)) i l R μ A' η₁ Q') (hR1 : 1 ≤ R) (hμ : 0 < μ) {η W y f η' : α} (hη : η₁ ≤ η) (hW : μ * Q' - η₁ * η₁ ≤ W)
    (hy0 : 0 ≤ y) (hy : y ≤ x.w i / x.r i) (hf : x.w i - x.w i / x.r i ≤ f) (hη' : x.w i * (x.r i - 1) + η ≤ η') (m₀ m₁ cap : κ → α) (B : α)
    (cover : ∀ m, 0 ≤ m → m ≤ μ → ∃ j, m₀ j ≤ m ∧ m ≤ m₁ j) (high : ∀ j, m₁ j ≤ μ)
    (hcap : ∀ j, η ≤ cap j ∨ m₁ j * (R - 1) ≤ cap j ∨ ∃ s, 0 ≤ s ∧ m₁ j * (μ - m₁ j) * W ≤ s * s ∧ m₁ j * η + s ≤ μ * cap j)
    (hB : ∀ j, NeedleValue μ (η + μ') y f (η' + μ') B (m₀ j) (m₁ j) (cap j + μ')) : x.TV ≤ B := by
  have hy1 : (Cell.mk x.l x.w g (fun _ => 1)).Sound := ⟨h.w_nonneg, h.w_sum, hg, fun t => le_trans (hg t) (le_of_eq (by ring)), hg⟩
  have over : ∀ s : ι → α, (∀ t, 0 ≤ s t ∧ 0 ≤ 1 - s t) →
      sum (fun t => x.w t * (s t * (x.r t - 1))) l ≤ sum (fun t => x.w t * (s t * (g t - 1))) l + μ' := fun s hs => by
    have k : sum (fun t => x.w t * (s t * (x.r t - 1))) l ≤ sum (fun t => 1 * (x.w t * (s t * (g t - 1))) + μ' * (x.w t * ξ t)) l := sum_le l (fun t =>
      le_cert (nonneg_mul (h.w_nonneg t) (add_nonneg (nonneg_mul (hs t).1 (sub_nonneg (hr t))) (nonneg_mul (hs t).2 (nonneg_mul hμ' (hξ0 t))))) (by ring))
    rw [sum_lin2] at k
    exact le_trans k (le_cert (nonneg_mul hμ' (sub_nonneg hξ)) (by ring))
  have e1 : η₀ ≤ η + μ' := by
    have k := over (fun _ => 1) (fun _ => ⟨zero_le_one, le_of_eq (by ring)⟩)
    rw [sum_congr l (f := fun t => x.w t * (1 * (x.r t - 1))) (g := fun t => x.w t * (x.r t - 1)) (fun t => by ring), hR.η_eq,
      sum_congr l (f := fun t => x.w t * (1 * (g t - 1))) (g := fun t => x.w t * (g t - 1)) (fun t => by ring),
      show sum (fun t => x.w t * (g t - 1)) l = η₁ from hG.η_eq] at k
    exact le_trans k (add_le_add hη (le_refl μ'))
  have e2 : x.eta ≤ η' + μ' := by
    show x.mean (fun t => x.r t - 1) ≤ _
    rw [hR.mean_split, hR.η_eq]
    exact le_cert (add_nonneg (sub_nonneg e1) (sub_nonneg hη')) (by ring)
  refine h.tv_le_needle_caps hR e1 hy0 hy hf e2 m₀ m₁ (fun j => cap j + μ') B cover (fun j s hs h1 => ?_) hB
  exact le_trans (over s hs.frac) (add_le_add (hy1.needle_cap hG hR1 hμ hη hW (high j) (hcap j) hs h1) (le_refl μ'))
end WitCert
