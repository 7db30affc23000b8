import WitCert.Attention.Threshold
/-!
# The `extremal` form

`TV` is at most the best value `a/(a + y) - α` over all sets of tokens (`tv_le_attack`), and for divisible tokens the
sets of largest radii suffice (`attack_le_upper`): no attack, whole or fractional, does better than some threshold set.

The proof fixes `z ≥ 1` and the threshold set `s*` with `Z(s*) = z`, at a threshold `θ > z`, and uses one function of
the radius, `peak = max((zθ-1)(r-z), (θ-z)θ(z-1/r))`, whose mean is `(θ²-1)·z·F(s*)`.
* An attack with `Z = z` has gain `Σ s(r-z) = Σ (1-s)(z-1/r)`, a mixture of the two branches.
* An attack with `Z = 1/z < 1` has `F = Σ s(rz-1) = Σ (1-s)(1-z/r)`, and termwise `peak ≥ (θ-z)(rz-1)` and
  `peak ≥ (zθ-1)θ(1-z/r)`; the two coefficients add up to `z(θ²-1)`.
If `θ ≤ z`, the set of all tokens above `z` does the same with `max(r-z, 0)`. No square root, no optimum over an
infinite family, no order of the tokens is needed.
-/
set_option synthInstance.maxSize 4000
universe u v
namespace WitCert
variable {α : Type u} [OrderedField α]

/-! ### The peak function -/
section
variable (z θ r i : α)
/-- The larger branch at radius `r` with `i = 1/r`. -/
def peak : α := if θ ≤ r then (z * θ - 1) * (r - z) else (θ - z) * θ * (z - i)
theorem peak_cases : (θ ≤ r ∧ peak z θ r i = (z * θ - 1) * (r - z)) ∨ (r < θ ∧ peak z θ r i = (θ - z) * θ * (z - i)) := by
  show (θ ≤ r ∧ @ite α _ (OrderedField.decLe θ r) _ _ = _) ∨ (r < θ ∧ @ite α _ (OrderedField.decLe θ r) _ _ = _)
  cases OrderedField.decLe θ r with
  | isTrue h => exact Or.inl ⟨h, rfl⟩
  | isFalse h => exact Or.inr ⟨h, rfl⟩
end
variable {z θ r i : α} (hz : 1 ≤ z) (hθ : z ≤ θ) (hr : 1 ≤ r) (hi : r * i = 1)
include hz hθ hr hi

/-- The difference of the branches is `(r-θ)((zθ-1)r - (θ-z))/r`, and the second factor is nonnegative. -/
theorem branch_diff : r * ((z * θ - 1) * (r - z) - (θ - z) * θ * (z - i)) = (r - θ) * ((z * θ - 1) * r - (θ - z))
    ∧ 0 ≤ (z * θ - 1) * r - (θ - z) := by
  constructor
  · exact eq_lin hi (θ * (θ - z)) (by ring)
  · have h1 : 0 ≤ z * θ - 1 := nonneg_cert (add_nonneg (nonneg_mul (sub_nonneg hz) (le_trans zero_le_one (le_trans hz hθ))) (sub_nonneg (le_trans hz hθ))) (by ring)
    exact nonneg_cert (add_nonneg (nonneg_mul h1 (sub_nonneg hr)) (nonneg_mul (sub_nonneg hz) (add_nonneg (le_trans zero_le_one (le_trans hz hθ)) zero_le_one))) (by ring)
/-- Any mixture of the two branches is below the peak. -/
theorem mix_le_peak {s : α} (h0 : 0 ≤ s) (h1 : 0 ≤ 1 - s) :
    s * ((z * θ - 1) * (r - z)) + (1 - s) * ((θ - z) * θ * (z - i)) ≤ peak z θ r i := by
  have hd := branch_diff hz hθ hr hi
  have hr0 : 0 < r := lt_of_one_le hr
  cases peak_cases z θ r i with
  | inl h =>
    rw [h.2]
    refine le_of_mul_le hr0 (le_cert (nonneg_mul h1 (nonneg_mul (sub_nonneg h.1) hd.2)) (eq_lin hd.1 (1 - s) (by ring)))
  | inr h =>
    rw [h.2]
    refine le_of_mul_le hr0 (le_cert (nonneg_mul h0 (nonneg_mul (sub_nonneg (le_of_lt h.1)) hd.2)) (eq_lin hd.1 (-s) (by ring)))
theorem peak_ge_raised : (θ - z) * (r * z - 1) ≤ peak z θ r i := by
  have hr0 : 0 < r := lt_of_one_le hr
  have hz2 : 0 ≤ z * z - 1 := nonneg_cert (nonneg_mul (sub_nonneg hz) (add_nonneg (le_trans zero_le_one hz) zero_le_one)) (by ring)
  have hrz : 0 ≤ r * z - 1 := nonneg_cert (add_nonneg (nonneg_mul (sub_nonneg hr) (le_trans zero_le_one hz)) (sub_nonneg hz)) (by ring)
  cases peak_cases z θ r i with
  | inl h => rw [h.2]; exact le_cert (nonneg_mul (sub_nonneg h.1) hz2) (by ring)
  | inr h =>
    rw [h.2]
    refine le_of_mul_le hr0 (le_cert (nonneg_mul (nonneg_mul (sub_nonneg hθ) hrz) (sub_nonneg (le_of_lt h.1))) ?_)
    exact eq_lin hi (-(θ * (θ - z))) (by ring)
theorem peak_ge_lowered : (z * θ - 1) * θ * (1 - z * i) ≤ peak z θ r i := by
  have hr0 : 0 < r := lt_of_one_le hr
  have hz2 : 0 ≤ z * z - 1 := nonneg_cert (nonneg_mul (sub_nonneg hz) (add_nonneg (le_trans zero_le_one hz) zero_le_one)) (by ring)
  have hθ0 : 0 ≤ θ := le_trans zero_le_one (le_trans hz hθ)
  have h1 : 0 ≤ z * θ - 1 := nonneg_cert (add_nonneg (nonneg_mul (sub_nonneg hz) hθ0) (sub_nonneg (le_trans hz hθ))) (by ring)
  cases peak_cases z θ r i with
  | inl h =>
    rw [h.2]
    refine le_of_mul_le hr0 (le_cert (nonneg_mul (nonneg_mul h1 (sub_nonneg h.1)) (sub_nonneg (le_trans hθ h.1))) ?_)
    exact eq_lin hi ((z * θ - 1) * θ * z) (by ring)
  | inr h =>
    rw [h.2]
    refine le_of_mul_le hr0 (le_cert (nonneg_mul hθ0 (nonneg_mul (sub_nonneg (le_of_lt h.1)) hz2)) ?_)
    exact eq_lin hi (-(θ * (θ - z)) + (z * θ - 1) * θ * z) (by ring)
end WitCert
namespace WitCert.Cell
variable {α : Type u} [OrderedField α] {ι : Type v} {x : Cell α ι} (h : x.Sound)
include h

theorem Sound.r_inv (t : ι) : x.r t * (x.r t)⁻¹ = 1 := mul_inv_cancel (h.r_pos t)
omit h in
/-- Gain of an attack against the level `z`. -/
theorem gain_eq (s : ι → α) (z : α) : x.mean (fun t => s t * (x.r t - z)) = x.up s - z * x.mean s :=
  (x.mean_congr (g := fun t => 1 * (s t * x.r t) + -z * s t) (fun t => by ring)).trans ((x.mean_lin 1 (-z) _ s).trans (by
    show 1 * x.up s + -z * x.mean s = _; ring))
/-- Loss of an attack against the level `z`. -/
theorem Sound.loss_eq (s : ι → α) (z : α) : x.mean (fun t => (1 - s t) * (z - (x.r t)⁻¹)) = z * (1 - x.mean s) - x.lo s :=
  (x.mean_congr (g := fun t => -1 * ((1 - s t) * (x.r t)⁻¹) + -z * s t + z) (fun t => by ring)).trans
    ((h.mean_lin2 (-1) (-z) z _ s).trans (by show -1 * x.lo s + -z * x.mean s + z = _; ring))
theorem Sound.z_pos {s : ι → α} (hs : IsFrac s) : 0 < x.up s + x.lo s := by
  rw [z_eq]
  have h1 : ∀ t, 1 ≤ x.r t * (s t * x.r t + (1 - s t) * (x.r t)⁻¹) := fun t =>
    le_cert (nonneg_mul (hs t).1 (nonneg_mul (sub_nonneg (h.one_le_r t)) (add_nonneg (le_of_lt (h.r_pos t)) zero_le_one)))
      (eq_lin (h.r_inv t) (1 - s t) (by ring))
  have h2 := h.one_le_mean_mul h.r_pos h1 h.A_pos
  refine lt_of_le_of_ne (nonneg_of_mul h.A_pos (le_trans zero_le_one h2)) (fun e => ?_)
  have h3 : 1 ≤ x.A * 0 := by rw [← e]; exact h2
  exact zero_lt_one (le_trans h3 (le_of_eq (by ring)))
theorem Sound.one_le_A_mul_z {s : ι → α} (hs : IsFrac s) : 1 ≤ x.A * (x.up s + x.lo s) := by
  rw [z_eq]
  exact h.one_le_mean_mul h.r_pos (fun t =>
    le_cert (nonneg_mul (hs t).1 (nonneg_mul (sub_nonneg (h.one_le_r t)) (add_nonneg (le_of_lt (h.r_pos t)) zero_le_one)))
      (eq_lin (h.r_inv t) (1 - s t) (by ring))) h.A_pos
theorem Sound.attackValue_mul {s : ι → α} (hs : IsFrac s) :
    x.attackValue s * (x.up s + x.lo s) = x.up s - x.mean s * (x.up s + x.lo s) := by
  show (x.up s / (x.up s + x.lo s) - x.mean s) * (x.up s + x.lo s) = _
  exact eq_lin (div_mul_cancel (a := x.up s) (h.z_pos hs)) 1 (by ring)

/-- **extremal, any set.** `TV ≤ a/(a + y) - α` for some set of whole tokens, `a = Σ_S w e^c`, `y = Σ_{S^c} w e^{-c}`,
`α = Σ_S w`: the maximum over all sets is a bound.

Code: `witcert_core.meter.bounds.extremal.bound`.
`python: TV <= max(attack_value(s) for s in cell.subsets)` -/
theorem Sound.tv_le_attack : ∃ s, IsSet s ∧ x.TV ≤ x.attackValue s := by
  have at0 := h.attack
  have hs := at0.isSet
  refine ⟨x.raised, hs, ?_⟩
  have hU : x.mean (fun t => x.raised t * x.a t) ≤ x.up x.raised := h.mean_le (fun t => mul_le_mul_left (hs.frac t).1 (h.upper t))
  have hV : x.lo x.raised ≤ x.mean (fun t => (1 - x.raised t) * x.a t) := h.mean_le (fun t => mul_le_mul_left (hs.frac t).2 (h.inv_r_le_a t))
  have hV0 : 0 ≤ x.lo x.raised := h.mean_nonneg (fun t => nonneg_mul (hs.frac t).2 (h.inv_r_nonneg t))
  have hU0 : 0 ≤ x.mean (fun t => x.raised t * x.a t) := h.mean_nonneg (fun t => nonneg_mul (hs.frac t).1 (h.a_nonneg t))
  have htv := at0.tv
  have hz := h.z_pos hs.frac
  have key : x.TV + x.mean x.raised ≤ x.up x.raised / (x.up x.raised + x.lo x.raised) := by
    refine le_div hz (le_of_mul_le at0.pos ?_)
    exact le_cert (add_nonneg (nonneg_mul (le_trans hU0 hU) (sub_nonneg hV)) (nonneg_mul hV0 (sub_nonneg hU)))
      (eq_lin htv (-(x.up x.raised + x.lo x.raised)) (by ring))
  exact le_cert (sub_nonneg key) (by show _ / _ - _ - _ = _; ring)

/-- Attack at level `z` against the strict threshold set `{r > z}`: gain `Σ w max(r - z, 0)` at a `Z ≤ z`. -/
theorem Sound.strict_value {z : α} (hZ : x.up (x.upper z 0) + x.lo (x.upper z 0) ≤ z) :
    x.mean (fun t => x.upper z 0 t * (x.r t - z)) ≤ x.attackValue (x.upper z 0) * z := by
  have hf : IsFrac (x.upper z 0) := x.upper_isFrac (le_refl 0) (nonneg_cert zero_le_one (by ring))
  rw [gain_eq]
  have hp := h.z_pos hf
  have hU : 0 ≤ x.up (x.upper z 0) := h.mean_nonneg (fun t => nonneg_mul (hf t).1 (le_of_lt (h.r_pos t)))
  have e := h.attackValue_mul hf
  refine le_of_mul_le hp (le_cert (nonneg_mul hU (sub_nonneg hZ)) ?_)
  exact eq_lin e z (by ring)
omit h in
theorem strict_ge (x : Cell α ι) (z : α) (t : ι) : 0 ≤ x.upper z 0 t * (x.r t - z) ∧ x.r t - z ≤ x.upper z 0 t * (x.r t - z) := by
  cases le_or_lt (x.r t) z with
  | inl k => rw [x.upper_zero k]; exact ⟨le_of_eq (by ring), le_cert (sub_nonneg k) (by ring)⟩
  | inr k => rw [x.upper_above k]; exact ⟨nonneg_cert (sub_nonneg (le_of_lt k)) (by ring), le_of_eq (by ring)⟩

/-- Level `z ≥ 1`: one threshold set beats every attack with `Z = z` and every attack with `Z = 1/z`. -/
theorem Sound.upper_at_level (R : α) (hR : ∀ t, x.r t ≤ R) {z : α} (hz : 1 ≤ z) (hzA : z ≤ x.A) :
    ∃ θ τ, 0 ≤ τ ∧ 0 ≤ 1 - τ ∧ ∀ s, IsFrac s →
      (x.up s + x.lo s = z → x.attackValue s ≤ x.attackValue (x.upper θ τ)) ∧
      ((x.up s + x.lo s) * z = 1 → x.attackValue s ≤ x.attackValue (x.upper θ τ)) := by
  have hz0 : 0 < z := lt_of_one_le hz
  have hlow : x.mean (fun t => (x.r t)⁻¹) ≤ z := by
    have h1 := h.mean_le (g := fun _ => 1) (fun t => le_of_mul_le (h.r_pos t) (by
      rw [mul_inv_cancel (h.r_pos t)]; exact le_trans (h.one_le_r t) (le_of_eq (by ring))))
    rw [h.mean_const] at h1
    exact le_trans h1 hz
  -- the level of any attack, in both normalisations
  have lvl1 : ∀ s, IsFrac s → x.up s + x.lo s = z →
      x.attackValue s * z = x.mean (fun t => s t * (x.r t - z)) ∧ x.attackValue s * z = x.mean (fun t => (1 - s t) * (z - (x.r t)⁻¹)) :=
    fun s hs e => by
      have e1 := h.attackValue_mul hs
      rw [gain_eq, h.loss_eq]
      refine ⟨eq_lin2 e1 e 1 (x.attackValue s * -1 - x.mean s) (by ring), eq_lin2 e1 e 1 (x.attackValue s * -1 - x.mean s + 1) (by ring)⟩
  have lvl2 : ∀ s, IsFrac s → (x.up s + x.lo s) * z = 1 →
      x.attackValue s = x.mean (fun t => s t * (x.r t * z - 1)) ∧ x.attackValue s = x.mean (fun t => (1 - s t) * (1 - z * (x.r t)⁻¹)) :=
    fun s hs e => by
      have e1 := h.attackValue_mul hs
      have g1 : x.mean (fun t => s t * (x.r t * z - 1)) = z * x.up s - x.mean s :=
        (x.mean_congr (g := fun t => z * (s t * x.r t) + -1 * s t) (fun t => by ring)).trans ((x.mean_lin z (-1) _ s).trans (by
          show z * x.up s + -1 * x.mean s = _; ring))
      have g2 : x.mean (fun t => (1 - s t) * (1 - z * (x.r t)⁻¹)) = 1 - x.mean s - z * x.lo s :=
        (x.mean_congr (g := fun t => -z * ((1 - s t) * (x.r t)⁻¹) + -1 * s t + 1) (fun t => by ring)).trans
          ((h.mean_lin2 (-z) (-1) 1 _ s).trans (by show -z * x.lo s + -1 * x.mean s + 1 = _; ring))
      rw [g1, g2]
      refine ⟨eq_lin2 e1 e z (-x.attackValue s - x.mean s) (by ring), eq_lin2 e1 e z (-x.attackValue s - x.mean s + 1) (by ring)⟩
  cases h.threshold_reaches R hR hlow hzA with
  | intro θ H => cases H with
    | intro τ H =>
      have hf : IsFrac (x.upper θ τ) := x.upper_isFrac H.1 H.2.1
      cases le_or_lt θ z with
      | inl c =>
        -- threshold at or below the level: take {r > z}
        have hZ : x.up (x.upper z 0) + x.lo (x.upper z 0) ≤ z := le_trans (h.z_mono (fun t => by
          cases le_or_lt (x.r t) z with
          | inl k => rw [x.upper_zero k]; exact (hf t).1
          | inr k => rw [x.upper_above k, x.upper_above (lt_of_le_of_lt c k)]; exact le_refl 1)) (le_of_eq H.2.2)
        have hv := h.strict_value hZ
        refine ⟨z, 0, le_refl 0, nonneg_cert zero_le_one (by ring), fun s hs => ⟨fun e => ?_, fun e => ?_⟩⟩
        · refine le_of_mul_le hz0 (le_trans (le_of_eq (mul_comm _ _)) (le_trans (le_trans (le_of_eq (lvl1 s hs e).1) (le_trans (h.mean_le (fun t => ?_)) hv)) (le_of_eq (mul_comm _ _))))
          have k := x.strict_ge z t
          exact le_cert (add_nonneg (nonneg_mul (hs t).1 (sub_nonneg k.2)) (nonneg_mul (hs t).2 k.1)) (by ring)
        · refine le_of_mul_le hz0 (le_trans ?_ (le_trans hv (le_of_eq (mul_comm _ _))))
          rw [(lvl2 s hs e).2, ← mean_mul]
          refine h.mean_le (fun t => ?_)
          have k := x.strict_ge z t
          cases le_total (x.r t) z with
          | inl d =>
            -- then 1 - z/r ≤ 0
            refine le_trans ?_ k.1
            refine le_of_mul_le (h.r_pos t) (le_cert (nonneg_mul (le_of_lt hz0) (nonneg_mul (hs t).2 (sub_nonneg d))) (eq_lin (h.r_inv t) (z * z * (1 - s t)) (by ring)))
          | inr d =>
            refine le_trans (le_of_mul_le (h.r_pos t) (y := x.r t - z) ?_) k.2
            refine le_cert (nonneg_mul (sub_nonneg d) (add_nonneg (sub_nonneg d) (nonneg_mul (le_of_lt hz0) (hs t).1))) (eq_lin (h.r_inv t) (z * z * (1 - s t)) (by ring))
      | inr c =>
        have hθ := le_of_lt c
        have hD : 0 < θ * θ - 1 := lt_cert (mul_pos (pos_of_sub (lt_of_le_of_lt hz c)) (add_pos (lt_of_one_le (le_trans hz hθ)) zero_le_one))
          (show θ * θ - 1 - 0 = (θ - 1) * (θ + 1) from by ring)
        have l1 := lvl1 _ hf H.2.2
        -- mean of the peak = (θ² - 1) z F(s*)
        have hpk : x.mean (fun t => peak z θ (x.r t) (x.r t)⁻¹) = (θ * θ - 1) * (x.attackValue (x.upper θ τ) * z) := by
          have e1 : ∀ t, peak z θ (x.r t) (x.r t)⁻¹ = (z * θ - 1) * (x.upper θ τ t * (x.r t - z)) + (θ - z) * θ * ((1 - x.upper θ τ t) * (z - (x.r t)⁻¹)) := fun t => by
            cases x.upper_cases θ τ t with
            | inl k =>
              rw [k.2]
              cases peak_cases z θ (x.r t) (x.r t)⁻¹ with
              | inl p => rw [p.2]; ring
              | inr p => exact absurd (le_of_lt p.1) k.1
            | inr k => cases k with
              | inl k =>
                have hi := h.r_inv t
                rw [k.2]
                cases peak_cases z θ (x.r t) (x.r t)⁻¹ with
                | inl p =>
                  rw [p.2]
                  -- at r = θ both branches agree
                  exact eq_lin2 hi k.1 ((1 - τ) * (θ - z) - 0) ((1 - τ) * (z * θ - 1 - (θ - z) * (x.r t)⁻¹)) (by ring)
                | inr p => exact absurd (le_of_eq k.1.symm) p.1
              | inr k =>
                rw [k.2]
                cases peak_cases z θ (x.r t) (x.r t)⁻¹ with
                | inl p => exact absurd p.1 k.1
                | inr p => rw [p.2]; ring
          rw [x.mean_congr e1, mean_lin, ← l1.1, ← l1.2]
          ring
        refine ⟨θ, τ, H.1, H.2.1, fun s hs => ⟨fun e => ?_, fun e => ?_⟩⟩
        · refine le_of_mul_le (mul_pos hD hz0) ?_
          have m := lvl1 s hs e
          have k : (θ * θ - 1) * (x.attackValue s * z) ≤ x.mean (fun t => peak z θ (x.r t) (x.r t)⁻¹) := by
            refine le_trans (le_of_eq (show _ = (z * θ - 1) * (x.attackValue s * z) + (θ - z) * θ * (x.attackValue s * z) from by ring)) ?_
            refine le_trans (add_le_add (le_of_eq (congrArg (fun v => (z * θ - 1) * v) m.1)) (le_of_eq (congrArg (fun v => (θ - z) * θ * v) m.2))) ?_
            show (z * θ - 1) * x.mean (fun t => s t * (x.r t - z)) + (θ - z) * θ * x.mean (fun t => (1 - s t) * (z - (x.r t)⁻¹)) ≤ _
            rw [← mean_lin]
            exact h.mean_le (fun t => le_trans (le_of_eq (by ring)) (mix_le_peak hz hθ (h.one_le_r t) (h.r_inv t) (hs t).1 (hs t).2))
          rw [hpk] at k
          exact le_trans (le_of_eq (by ring)) (le_trans k (le_of_eq (by ring)))
        · refine le_of_mul_le (mul_pos hD hz0) ?_
          have m := lvl2 s hs e
          have k : (θ * θ - 1) * (x.attackValue s * z) ≤ x.mean (fun t => peak z θ (x.r t) (x.r t)⁻¹) := by
            refine le_trans (le_of_eq (show _ = (θ - z) * x.attackValue s + (z * θ - 1) * θ * x.attackValue s from by ring)) ?_
            refine le_trans (add_le_add (le_of_eq (congrArg (fun v => (θ - z) * v) m.1)) (le_of_eq (congrArg (fun v => (z * θ - 1) * θ * v) m.2))) ?_
            show (θ - z) * x.mean (fun t => s t * (x.r t * z - 1)) + (z * θ - 1) * θ * x.mean (fun t => (1 - s t) * (1 - z * (x.r t)⁻¹)) ≤ _
            rw [← mean_lin]
            refine h.mean_le (fun t => ?_)
            have p1 := peak_ge_raised hz hθ (h.one_le_r t) (h.r_inv t)
            have p2 := peak_ge_lowered hz hθ (h.one_le_r t) (h.r_inv t)
            exact le_cert (add_nonneg (nonneg_mul (hs t).1 (sub_nonneg p1)) (nonneg_mul (hs t).2 (sub_nonneg p2))) (by ring)
          rw [hpk] at k
          exact le_trans (le_of_eq (by ring)) (le_trans k (le_of_eq (by ring)))

/-- **Threshold sets suffice.** For divisible tokens no attack beats a set of largest radii: for every fractional set
`s` there are a threshold `θ` and a fraction `τ` with `F(s) ≤ F(upper θ τ)`, `F = a/(a + y) - α`.

Code: `witcert_core.meter.bounds.extremal.bound`.
`python: all(attack_value(s) <= code("extremal") for s in fractional)` -/
theorem Sound.attack_le_upper (R : α) (hR : ∀ t, x.r t ≤ R) {s : ι → α} (hs : IsFrac s) :
    ∃ θ τ, 0 ≤ τ ∧ 0 ≤ 1 - τ ∧ x.attackValue s ≤ x.attackValue (x.upper θ τ) := by
  have hp := h.z_pos hs
  cases le_total 1 (x.up s + x.lo s) with
  | inl c =>
    have hA : x.up s + x.lo s ≤ x.A := by
      rw [z_eq]
      refine h.mean_le (fun t => ?_)
      refine le_of_mul_le (h.r_pos t) (le_cert (nonneg_mul (hs t).2 (nonneg_mul (sub_nonneg (h.one_le_r t)) (add_nonneg (le_of_lt (h.r_pos t)) zero_le_one)))
        (eq_lin (h.r_inv t) (-(1 - s t)) (by ring)))
    cases h.upper_at_level R hR c hA with
    | intro θ H => cases H with
      | intro τ H => exact ⟨θ, τ, H.1, H.2.1, (H.2.2 s hs).1 rfl⟩
  | inr c =>
    have e := mul_inv_cancel hp
    have h1 : 1 ≤ (x.up s + x.lo s)⁻¹ := le_of_mul_le hp (le_trans (le_of_eq (by ring)) (le_trans c (le_of_eq e.symm)))
    have hA : (x.up s + x.lo s)⁻¹ ≤ x.A := le_of_mul_le hp (le_trans (le_of_eq e) (le_trans (h.one_le_A_mul_z hs) (le_of_eq (mul_comm _ _))))
    cases h.upper_at_level R hR h1 hA with
    | intro θ H => cases H with
      | intro τ H => exact ⟨θ, τ, H.1, H.2.1, (H.2.2 s hs).2 e⟩

/-- **extremal.** If `B` is at least the value of every threshold set, cut tokens included, then `TV ≤ B`.

Code: `witcert_core.meter.bounds.extremal.bound`.
`python: TV <= code("extremal")` -/
theorem Sound.tv_le_extremal (R : α) (hR : ∀ t, x.r t ≤ R) (B : α)
    (hB : ∀ θ τ, 0 ≤ τ → 0 ≤ 1 - τ → x.attackValue (x.upper θ τ) ≤ B) : x.TV ≤ B := by
  cases h.tv_le_attack with
  | intro s H => cases h.attack_le_upper R hR H.1.frac with
    | intro θ K => cases K with
      | intro τ K => exact le_trans H.2 (le_trans K.2.2 (hB θ τ K.1 K.2.1))
end WitCert.Cell
