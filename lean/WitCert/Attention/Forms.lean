import WitCert.Attention.Cell
/-!
# The closed forms `eform`, `tanh`, `rms`

Three bounds on the total variation from radii alone. `tanh` uses the largest radius only, `eform` the mean of `e^c`,
`rms` its second moment.
-/
set_option synthInstance.maxSize 4000
universe u v
namespace WitCert.Cell.Sound
variable {α : Type u} [OrderedField α] {ι : Type v} {x : Cell α ι} (h : x.Sound)
include h

/-- **eform.** `TV ≤ (A² - 1)/2` with `A = Σ p̃ e^c`.

Code: `witcert_core.meter.bounds.eform.bound`.
`python: TV <= (A * A - 1) / 2 <= code("eform")` -/
theorem tv_le_eform : x.TV ≤ (x.A * x.A - 1) / 2 := by
  have h1 : ∀ t, abs (x.a t * x.u - 1) ≤ x.A * x.r t + 0 * x.r t + -1 := fun t => by
    refine abs_le ?_ ?_
    · exact le_cert (sub_nonneg (mul_le_mul (h.a_nonneg t) (le_of_lt h.A_pos) (h.upper t) h.u_le_A)) (by ring)
    · have h1 : 1 ≤ (x.A * x.r t) * (x.a t * x.u) :=
        le_cert (add_nonneg (nonneg_mul (sub_nonneg (h.lower t)) (sub_nonneg h.one_le_Au))
          (add_nonneg (sub_nonneg (h.lower t)) (sub_nonneg h.one_le_Au))) (by ring)
      have hpos : 0 < x.A * x.r t := mul_pos h.A_pos (h.r_pos t)
      exact le_cert (sub_nonneg (two_le hpos h1)) (by ring)
  have h2 := h.mean_le h1
  rw [h.mean_lin2, ← h.tv2_eq] at h2
  refine le_div zero_lt_two (le_trans (le_of_eq (mul_comm _ _)) (le_trans h2 (le_of_eq ?_)))
  show x.A * x.A + 0 * x.A + -1 = x.A * x.A - 1
  ring

/-- **tanh.** If every `e^c ≤ R` then `TV ≤ (R - 1)/(R + 1)`, which is `tanh(M/2)` for `R = e^M`.

Code: `witcert_core.meter.bounds.tanh.bound`.
`python: TV <= (R - 1) / (R + 1) <= code("tanh")` -/
theorem tv_le_tanh (R : α) (hR : ∀ t, x.r t ≤ R) : x.TV ≤ (R - 1) / (R + 1) := by
  have hAR : x.A ≤ R := h.A_le hR
  have h1R : 1 ≤ R := le_trans h.one_le_A hAR
  have hR0 : 0 < R := lt_of_one_le h1R
  have hm : R * R⁻¹ = 1 := mul_inv_cancel hR0
  have ha : ∀ t, R⁻¹ ≤ x.a t := fun t => le_of_mul_le hR0 (by
    rw [hm]; exact le_trans (h.lower t) (mul_le_mul_right (h.a_nonneg t) (hR t)))
  have ha2 : ∀ t, x.a t ≤ R := fun t => le_trans (h.upper t) (hR t)
  have hZm : R⁻¹ ≤ x.Z := by
    have h1 := h.mean_le ha
    rw [h.mean_const] at h1
    exact h1
  have hZR : x.Z ≤ R := le_trans h.Z_le_A hAR
  -- the chord of the convex function |a - Z| over [1/R, R]
  have hch : ∀ t, (R - R⁻¹) * abs (x.a t - x.Z)
      ≤ (R + R⁻¹ - 2 * x.Z) * x.a t + 0 * x.a t + ((R - R⁻¹) * (x.Z - R⁻¹) - (R + R⁻¹ - 2 * x.Z) * R⁻¹) := fun t => by
    rw [← abs_mul_nonneg (sub_nonneg (le_trans hZm hZR))]
    refine abs_le ?_ ?_
    · exact le_cert (nonneg_mul zero_le_two (nonneg_mul (sub_nonneg hZm) (sub_nonneg (ha2 t)))) (by ring)
    · exact le_cert (nonneg_mul zero_le_two (nonneg_mul (sub_nonneg (ha t)) (sub_nonneg hZR))) (by ring)
  have hM : (R - R⁻¹) * x.M ≤ 2 * (x.Z - R⁻¹) * (R - x.Z) := by
    have h1 := h.mean_le hch
    rw [h.mean_lin2, mean_mul] at h1
    refine le_trans h1 (le_of_eq ?_)
    show (R + R⁻¹ - 2 * x.Z) * x.Z + 0 * x.Z + _ = _
    ring
  have hZu2 : 2 ≤ x.u + x.Z := two_le h.Z_pos (le_of_eq h.Zu.symm)
  -- u · (chord bound), then Z·u = 1, R·(1/R) = 1, Z + u ≥ 2
  have hD : (R - R⁻¹) * x.TV ≤ R + R⁻¹ - 2 := by
    refine le_of_mul_le zero_lt_two (le_trans (le_of_eq (show _ = (R - R⁻¹) * (2 * x.TV) from by ring)) ?_)
    rw [h.tv2_eq_M]
    exact le_cert (add_nonneg (nonneg_mul h.u_nonneg (sub_nonneg hM)) (nonneg_mul zero_le_two (sub_nonneg hZu2)))
      (eq_lin2 h.Zu hm (-(2 * (R + R⁻¹ - x.Z))) (2 * x.u) (by ring))
  refine le_div (add_pos hR0 zero_le_one) ?_
  cases le_or_lt R 1 with
  | inl hR1 =>
    -- R = 1: eform is 0
    have h1 := mul_le_of_le_div zero_lt_two h.tv_le_eform
    have hA1 : x.A ≤ 1 := le_trans hAR hR1
    have h0 : x.TV ≤ 0 := le_of_mul_le zero_lt_two (le_cert (add_nonneg (sub_nonneg h1)
      (nonneg_mul (sub_nonneg hA1) (add_nonneg (le_of_lt h.A_pos) zero_le_one))) (by ring))
    exact le_cert (add_nonneg (sub_nonneg h1R) (nonneg_mul (sub_nonneg h0) (add_nonneg (le_of_lt hR0) zero_le_one))) (by ring)
  | inr hR1 =>
    refine le_of_mul_le (r := R - 1) (pos_of_sub hR1) ?_
    exact le_cert (nonneg_mul (le_of_lt hR0) (sub_nonneg hD)) (eq_lin hm (-(x.TV + 1)) (by ring))

/-- The second moment of the relative change: `Σ w (a/Z - 1)² ≤ A² Q`. -/
theorem moment_le : x.mean (fun t => (x.a t * x.u - 1) * (x.a t * x.u - 1)) ≤ x.A * x.A * x.Q := by
  have h1 : x.mean (fun t => (x.a t - x.Z) * (x.a t - x.Z))
      = 1 * x.mean (fun t => (x.a t - 1) * (x.a t - 1)) + (2 - 2 * x.Z) * x.Z + (x.Z * x.Z - 1) :=
    (x.mean_congr (fun t => by ring)).trans (h.mean_lin2 1 (2 - 2 * x.Z) (x.Z * x.Z - 1) (fun t => (x.a t - 1) * (x.a t - 1)) x.a)
  have h2 : x.mean (fun t => (x.a t - 1) * (x.a t - 1)) ≤ x.Q := h.mean_le (fun t => le_cert
    (nonneg_mul (sub_nonneg (h.upper t)) (sub_nonneg (two_le (h.r_pos t) (h.lower t)))) (by ring))
  have h3 : x.mean (fun t => (x.a t - x.Z) * (x.a t - x.Z)) ≤ x.Q := by
    rw [h1]
    exact le_cert (add_nonneg (sub_nonneg h2) (sq_nonneg (x.Z - 1))) (by ring)
  have h4 : x.mean (fun t => (x.a t * x.u - 1) * (x.a t * x.u - 1)) = x.u * x.u * x.mean (fun t => (x.a t - x.Z) * (x.a t - x.Z)) :=
    (x.mean_congr (fun t => by
      rw [show x.a t * x.u - 1 = x.u * (x.a t - x.Z) from eq_lin h.Zu 1 (by ring)]
      ring)).trans (x.mean_mul _ (fun t => (x.a t - x.Z) * (x.a t - x.Z)))
  rw [h4]
  exact mul_le_mul (nonneg_mul h.u_nonneg h.u_nonneg) h.Q_nonneg
    (mul_le_mul h.u_nonneg (le_of_lt h.A_pos) h.u_le_A h.u_le_A) h3

/-- **The second moment once more**: `Σ w (a/Z - 1)² (1 - Q) ≤ Q`, so that `1/√(1 - Q)` stands for `A` where `Q < 1`.

Code: `witcert_core.meter.output.output_bound`.
`python: (1 - Q) * cell.mean([(x / cell.Z - 1) ** 2 for x in cell.a]) <= Q` -/
theorem moment_le_left : (1 - x.Q) * x.mean (fun t => (x.a t * x.u - 1) * (x.a t * x.u - 1)) ≤ x.Q := by
  have h1 : x.mean (fun t => (x.a t * x.u - 1) * (x.a t * x.u - 1))
      = x.u * x.u * x.mean (fun t => (x.a t - 1) * (x.a t - 1)) + (2 * (x.u * x.u) - 2 * x.u) * x.Z + (1 - x.u * x.u) := by
    rw [x.mean_congr (g := fun t => x.u * x.u * ((x.a t - 1) * (x.a t - 1)) + (2 * (x.u * x.u) - 2 * x.u) * x.a t + (1 - x.u * x.u)) (fun t => by ring),
      h.mean_lin2]
    rfl
  have h2 : x.mean (fun t => (x.a t - 1) * (x.a t - 1)) ≤ x.Q := h.mean_le (fun t => le_cert
    (nonneg_mul (sub_nonneg (h.upper t)) (sub_nonneg (two_le (h.r_pos t) (h.lower t)))) (by ring))
  have m0 : 0 ≤ x.mean (fun t => (x.a t * x.u - 1) * (x.a t * x.u - 1)) := h.mean_nonneg (fun t => sq_nonneg _)
  rw [h1] at m0
  rw [h1]
  generalize x.mean (fun t => (x.a t - 1) * (x.a t - 1)) = M at h2 m0
  cases le_or_lt x.Q 1 with
  | inl q =>
    exact le_cert (add_nonneg (nonneg_mul (nonneg_mul (sub_nonneg q) (nonneg_mul h.u_nonneg h.u_nonneg)) (sub_nonneg h2)) (sq_nonneg (x.Q * x.u - (x.u - 1))))
      (eq_lin h.Zu (-((1 - x.Q) * (2 * x.u - 2))) (by ring))
  | inr q => exact le_trans (le_cert (nonneg_mul (sub_nonneg (le_of_lt q)) m0) (by ring)) h.Q_nonneg

/-- **rms.** `TV ≤ ½ A √Q`: for any `s ≥ 0` with `Q ≤ s²`, `TV ≤ A s / 2`.

Code: `witcert_core.meter.bounds.rms.bound`.
`python: (2 * TV) ** 2 <= A * A * Q <= (2 * code("rms")) ** 2` -/
theorem tv_le_rms (s : α) (hs : 0 ≤ s) (hQ : x.Q ≤ s * s) : x.TV ≤ x.A * s / 2 := by
  refine le_div zero_lt_two (le_trans (le_of_eq (mul_comm _ _)) (le_of_sq_le (nonneg_mul (le_of_lt h.A_pos) hs) ?_))
  have h1 : 2 * x.TV * (2 * x.TV) ≤ x.mean (fun t => abs (x.a t * x.u - 1) * abs (x.a t * x.u - 1)) := by
    rw [h.tv2_eq]; exact h.mean_sq_le _
  rw [x.mean_congr (fun t => abs_mul_self (x.a t * x.u - 1))] at h1
  refine le_trans h1 (le_trans h.moment_le ?_)
  exact le_cert (nonneg_mul (nonneg_mul (le_of_lt h.A_pos) (le_of_lt h.A_pos)) (sub_nonneg hQ)) (by ring)

/-- **The meter may be clipped at 1**: `TV ≤ 1`.

Code: `witcert_core.meter.bounds.meter`.
`python: TV <= 1 and code("meter") <= 1` -/
theorem tv_le_one : x.TV ≤ 1 := by
  have h1 : sum (fun t => abs (x.p t - x.w t)) x.l ≤ sum (fun t => x.p t + x.w t) x.l := sum_le x.l (fun t =>
    abs_le (le_cert (add_nonneg (h.w_nonneg t) (h.w_nonneg t)) (by ring)) (le_cert (add_nonneg (h.p_nonneg t) (h.p_nonneg t)) (by ring)))
  rw [sum_add, h.p_sum, h.w_sum] at h1
  exact div_le zero_lt_two (le_trans h1 (le_of_eq (by ring)))

/-- **Accumulators rounded up keep the closed forms**: for `A ≤ A'` and `Q ≤ s²`, `TV ≤ (A'² - 1)/2` and `TV ≤ A' s/2`.

Code: `witcert_core.meter.sums.accumulate_weights` (every field is rounded outward).
`python: A - 1 <= field("ETA") and Q <= field("Q") and TV <= ((1 + field("ETA")) ** 2 - 1) / 2 and (2 * TV) ** 2 <= (1 + field("ETA")) ** 2 * field("Q")` -/
theorem outward_forms {A' s : α} (hA : x.A ≤ A') (hs : 0 ≤ s) (hQ : x.Q ≤ s * s) : x.TV ≤ (A' * A' - 1) / 2 ∧ x.TV ≤ A' * s / 2 := by
  constructor
  · refine le_trans h.tv_le_eform (div_le zero_lt_two ?_)
    rw [div_mul_cancel zero_lt_two]
    have k := mul_le_mul (le_of_lt h.A_pos) (le_trans (le_of_lt h.A_pos) hA) hA hA
    exact le_cert (sub_nonneg k) (by ring)
  · refine le_trans (h.tv_le_rms s hs hQ) (div_le zero_lt_two ?_)
    rw [div_mul_cancel zero_lt_two]
    exact mul_le_mul_right hs hA
end WitCert.Cell.Sound
