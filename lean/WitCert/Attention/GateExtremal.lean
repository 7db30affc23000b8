import WitCert.Attention.Gate
/-!
# The extremal bound never rises under repair

Restoring exact keys tilts the weights by the exact ratios, so a smaller bound is not obvious: with whole tokens it is
false. For divisible tokens every attack on the repaired cell is matched before it: the same set, if the weight outside the
repaired tokens grew, and the fraction `1/D` of it if it shrank by `D`.
-/
set_option synthInstance.maxSize 4000
universe u v
namespace WitCert.Cell
variable {α : Type u} [OrderedField α] {ι : Type v} {x : Cell α ι} (h : x.Sound) (R : ι → Bool)
include h

/-- In the repaired cell some best attack leaves the repaired tokens alone. -/
theorem Sound.avoid_repaired {M : α} (hM : ∀ t, x.r t ≤ M) {s : ι → α} (hs : IsFrac s) :
    ∃ s', IsFrac s' ∧ (∀ t, R t = true → s' t = 0) ∧ (x.repair R).attackValue s ≤ (x.repair R).attackValue s' := by
  have hy := h.repair_sound R
  have rR : ∀ t, R t = true → (x.repair R).r t = 1 := fun t e => by
    show cond (R t) 1 (x.r t) = 1
    rw [e]; rfl
  have f1 : IsFrac ((x.repair R).upper 1 0) := (x.repair R).upper_isFrac (le_refl 0) (nonneg_cert zero_le_one (by ring))
  cases hy.attack_le_upper M (h.repair_tanh R hM).1 hs with
  | intro θ H => cases H with
    | intro τ H =>
      have hf := (x.repair R).upper_isFrac (θ := θ) H.1 H.2.1
      cases le_or_lt θ 1 with
      | inr c => exact ⟨_, hf, fun t e => (x.repair R).upper_below (by rw [rR t e]; exact c), H.2.2⟩
      | inl c =>
        -- θ ≤ 1: everything above 1 is raised; lowering the tokens at 1 does not hurt
        refine ⟨(x.repair R).upper 1 0, f1, fun t e => (x.repair R).upper_zero (le_of_eq (rR t e)), le_trans H.2.2 ?_⟩
        have k1 := hy.attackValue_mul hf
        have k2 := hy.attackValue_mul f1
        have p1 := hy.z_pos hf
        have p2 := hy.z_pos f1
        -- on tokens where the two sets differ r = 1, so Z is the same and the difference of up equals that of the masses
        have cases1 : ∀ t, (x.repair R).upper 1 0 t = (x.repair R).upper θ τ t ∨ ((x.repair R).r t = 1 ∧ (x.repair R).upper 1 0 t = 0) := fun t => by
          cases le_or_lt ((x.repair R).r t) 1 with
          | inl d => exact Or.inr ⟨le_antisymm d (hy.one_le_r t), (x.repair R).upper_zero d⟩
          | inr d => exact Or.inl (by rw [(x.repair R).upper_above d, (x.repair R).upper_above (lt_of_le_of_lt c d)])
        have eZ : (x.repair R).up ((x.repair R).upper θ τ) + (x.repair R).lo ((x.repair R).upper θ τ) = (x.repair R).up ((x.repair R).upper 1 0) + (x.repair R).lo ((x.repair R).upper 1 0) := by
          rw [z_eq, z_eq]
          refine (x.repair R).mean_congr (fun t => ?_)
          cases cases1 t with
          | inl e => rw [e]
          | inr e =>
            have i := hy.r_inv t
            rw [e.1] at i
            rw [e.1, e.2]
            exact eq_lin i (-((x.repair R).upper θ τ t)) (by ring)
        have eU : (x.repair R).up ((x.repair R).upper θ τ) - (x.repair R).up ((x.repair R).upper 1 0) = (x.repair R).mean ((x.repair R).upper θ τ) - (x.repair R).mean ((x.repair R).upper 1 0) := by
          show (x.repair R).mean _ - (x.repair R).mean _ = _
          rw [← mean_sub, ← mean_sub]
          refine (x.repair R).mean_congr (fun t => ?_)
          cases cases1 t with
          | inl e => rw [e]; ring
          | inr e => rw [e.1, e.2]; ring
        have hm : 0 ≤ (x.repair R).mean ((x.repair R).upper θ τ) - (x.repair R).mean ((x.repair R).upper 1 0) := by
          rw [← mean_sub]
          refine hy.mean_nonneg (fun t => ?_)
          cases cases1 t with
          | inl e => rw [e]; exact le_of_eq (by ring)
          | inr e => rw [e.2]; exact nonneg_cert (hf t).1 (by ring)
        have hz1 : 1 ≤ (x.repair R).up ((x.repair R).upper 1 0) + (x.repair R).lo ((x.repair R).upper 1 0) := by
          rw [z_eq]
          refine le_trans (le_of_eq (hy.mean_const 1).symm) (hy.mean_le (fun t => ?_))
          cases le_or_lt ((x.repair R).r t) 1 with
          | inl d =>
            have e : (x.repair R).r t = 1 := le_antisymm d (hy.one_le_r t)
            have i := hy.r_inv t
            rw [e] at i
            rw [(x.repair R).upper_zero d, e]
            exact le_of_eq (eq_lin i (-1) (by ring))
          | inr d =>
            rw [(x.repair R).upper_above d]
            exact le_trans (hy.one_le_r t) (le_of_eq (by ring))
        rw [eZ] at k1
        refine le_of_mul_le p2 (le_trans (le_of_eq (mul_comm _ _)) (le_trans ?_ (le_of_eq (mul_comm _ _))))
        rw [k1, k2]
        exact le_cert (nonneg_mul hm (sub_nonneg hz1)) (eq_lin eU (-1) (by ring))

omit h in
theorem unscale {D φ G U V m : α} (hD : D * φ = 1) (k : G * (φ * U + φ * V) = φ * U - φ * m * (φ * U + φ * V)) :
    G * (U + V) = U - φ * m * (U + V) := eq_lin2 k hD D (-(G * (U + V)) + U - φ * m * (U + V)) (by ring)
omit h in
theorem unscale_pos {D φ U V : α} (h0 : 0 < D) (hD : D * φ = 1) (k : 0 < φ * U + φ * V) : 0 < U + V :=
  lt_of_lt_of_le (mul_pos h0 k) (le_of_eq (eq_lin hD (U + V) (by ring)))
omit h in
theorem grow_step {U V vR Y m φ G F : α} (hU : 0 ≤ U) (hm : 0 ≤ m) (hφ : 1 ≤ φ) (hY : vR ≤ Y) (p : 0 < U + V)
    (hden : 0 < U + (V - vR + Y)) (k : F * (U + V) = U - m * (U + V)) (kv : G * (U + (V - vR + Y)) = U - φ * m * (U + (V - vR + Y))) : G ≤ F := by
  refine le_of_mul_le p (le_of_mul_le hden ?_)
  have g1 : 0 ≤ U * (Y - vR) := nonneg_mul hU (sub_nonneg hY)
  have g2 : 0 ≤ (φ - 1) * m * ((U + V) * (U + (V - vR + Y))) := nonneg_mul (nonneg_mul (sub_nonneg hφ) hm) (nonneg_mul (le_of_lt p) (le_of_lt hden))
  exact le_cert (add_nonneg g1 g2) (eq_lin2 kv k (-(U + V)) (U + (V - vR + Y)) (by ring))
omit h in
theorem shrink_step {U V vR vN Y ρ m φ G F : α} (hU : 0 ≤ U) (hφ : 0 ≤ φ) (hD : (1 - ρ + Y) * φ = 1) (c : 1 ≤ 1 - ρ + Y)
    (hvN : vN ≤ 1 - ρ) (hvρ : vR ≤ ρ) (p : 0 < φ * U + ((1 - φ) * (vN + vR) + φ * V)) (hden : 0 < U + (V - vR + Y))
    (k : F * (φ * U + ((1 - φ) * (vN + vR) + φ * V)) = φ * U - φ * m * (φ * U + ((1 - φ) * (vN + vR) + φ * V)))
    (kv : G * (U + (V - vR + Y)) = U - φ * m * (U + (V - vR + Y))) : G ≤ F := by
  refine le_of_mul_le p (le_of_mul_le hden ?_)
  -- (1 - ρ + Y)(vN + vR) ≤ vN + Y
  have g1 : 0 ≤ (Y - ρ) * (1 - ρ - vN) := nonneg_mul (nonneg_cert (sub_nonneg c) (by ring)) (sub_nonneg hvN)
  have g2 : 0 ≤ (1 - ρ + Y) * (ρ - vR) := nonneg_mul (le_trans zero_le_one c) (sub_nonneg hvρ)
  have g3 : 0 ≤ vN + Y - (1 - ρ + Y) * (vN + vR) := nonneg_cert (add_nonneg g1 g2) (by ring)
  exact le_cert (nonneg_mul (nonneg_mul hU hφ) g3)
    (eq_lin3 k kv hD (U + (V - vR + Y)) (-(φ * U + ((1 - φ) * (vN + vR) + φ * V))) (U * (vN + vR)) (by ring))

/-- **The extremal bound never rises under repair** (tokens divisible): every attack on the repaired cell is matched by
an attack on the cell before.

Code: `witcert_core.meter.bounds.extremal.bound`.
`python: max(repaired.attack_value(s) for s in repaired.subsets) <= code("extremal") and repaired.code("extremal") <= code("extremal") * (1 + tiny) + tiny ** 2` -/
theorem Sound.repair_extremal {M : α} (hM : ∀ t, x.r t ≤ M) {s : ι → α} (hs : IsFrac s) :
    ∃ s', IsFrac s' ∧ (x.repair R).attackValue s ≤ x.attackValue s' := by
  cases h.avoid_repaired R hM hs with
  | intro s₀ H =>
    have hy := h.repair_sound R
    have hD := h.tilt_pos R
    have hDi := mul_inv_cancel hD
    have hDe := h.tilt_mean R
    have hf := H.1
    -- the repaired sums in terms of the original ones
    have eU : (x.repair R).up s₀ = (x.mean (x.tilt R))⁻¹ * x.up s₀ := by
      refine (repair_mean R _).trans (congrArg (fun v => (x.mean (x.tilt R))⁻¹ * v) (x.mean_congr (fun t => ?_)))
      have k := H.2.1 t
      show cond (R t) (x.a t) 1 * (s₀ t * cond (R t) 1 (x.r t)) = s₀ t * x.r t
      revert k
      cases R t with
      | true => exact fun k => by rw [k rfl]; show x.a t * (0 * 1) = 0 * x.r t; ring
      | false => exact fun _ => show 1 * (s₀ t * x.r t) = s₀ t * x.r t from by ring
    have em : (x.repair R).mean s₀ = (x.mean (x.tilt R))⁻¹ * x.mean s₀ := by
      refine (repair_mean R _).trans (congrArg (fun v => (x.mean (x.tilt R))⁻¹ * v) (x.mean_congr (fun t => ?_)))
      have k := H.2.1 t
      show cond (R t) (x.a t) 1 * s₀ t = s₀ t
      revert k
      cases R t with
      | true => exact fun k => by rw [k rfl]; show x.a t * 0 = 0; ring
      | false => exact fun _ => show 1 * s₀ t = s₀ t from by ring
    have eL : (x.repair R).lo s₀ = (x.mean (x.tilt R))⁻¹ * (x.lo s₀ - x.mean (fun t => mask R t * (x.r t)⁻¹) + x.mean (fun t => mask R t * x.a t)) := by
      have e1 : x.lo s₀ - x.mean (fun t => mask R t * (x.r t)⁻¹) + x.mean (fun t => mask R t * x.a t)
          = x.mean (fun t => (1 - s₀ t) * (x.r t)⁻¹ - mask R t * (x.r t)⁻¹ + mask R t * x.a t) := by
        rw [mean_add, mean_sub]; rfl
      rw [e1]
      refine (repair_mean R _).trans (congrArg (fun v => (x.mean (x.tilt R))⁻¹ * v) (x.mean_congr (fun t => ?_)))
      have k := H.2.1 t
      show cond (R t) (x.a t) 1 * ((1 - s₀ t) * (cond (R t) 1 (x.r t))⁻¹) = (1 - s₀ t) * (x.r t)⁻¹ - cond (R t) 1 0 * (x.r t)⁻¹ + cond (R t) 1 0 * x.a t
      revert k
      cases R t with
      | true =>
        intro k
        rw [k rfl]
        show x.a t * ((1 - 0) * (1 : α)⁻¹) = (1 - 0) * (x.r t)⁻¹ - 1 * (x.r t)⁻¹ + 1 * x.a t
        exact eq_lin (mul_inv_cancel (zero_lt_one (α := α))) (x.a t) (by ring)
      | false => exact fun _ => show 1 * ((1 - s₀ t) * (x.r t)⁻¹) = (1 - s₀ t) * (x.r t)⁻¹ - 0 * (x.r t)⁻¹ + 0 * x.a t from by ring
    have hYv : x.mean (fun t => mask R t * (x.r t)⁻¹) ≤ x.mean (fun t => mask R t * x.a t) :=
      h.mean_le (fun t => mul_le_mul_left (mask_nonneg R t).1 (h.inv_r_le_a t))
    have hinv1 : ∀ t, (x.r t)⁻¹ ≤ 1 := fun t => le_of_mul_le (h.r_pos t) (by
      rw [mul_inv_cancel (h.r_pos t)]; exact le_trans (h.one_le_r t) (le_of_eq (by ring)))
    have hvρ : x.mean (fun t => mask R t * (x.r t)⁻¹) ≤ x.mean (mask R) :=
      h.mean_le (fun t => le_trans (mul_le_mul_left (mask_nonneg R t).1 (hinv1 t)) (le_of_eq (by ring)))
    have hvN : x.mean (fun t => (1 - mask R t) * (x.r t)⁻¹) ≤ 1 - x.mean (mask R) := by
      refine le_trans (h.mean_le (fun t => mul_le_mul_left (mask_nonneg R t).2 (hinv1 t))) (le_of_eq ?_)
      refine (x.mean_congr (g := fun t => 1 - mask R t) (fun t => by ring)).trans ((x.mean_sub (fun _ => 1) (mask R)).trans ?_)
      rw [h.mean_const]
    have hU0 : 0 ≤ x.up s₀ := h.mean_nonneg (fun t => nonneg_mul (hf t).1 (le_of_lt (h.r_pos t)))
    have hm0 : 0 ≤ x.mean s₀ := h.mean_nonneg (fun t => (hf t).1)
    have kv := hy.attackValue_mul hf
    have pz := hy.z_pos hf
    rw [eU, eL, em] at kv
    rw [eU, eL] at pz
    -- V' stands for D·lo of the repaired cell
    have hden : 0 < x.up s₀ + (x.lo s₀ - x.mean (fun t => mask R t * (x.r t)⁻¹) + x.mean (fun t => mask R t * x.a t)) :=
      unscale_pos hD hDi pz
    have kv2 := unscale hDi kv
    cases le_total (x.mean (x.tilt R)) 1 with
    | inl c =>
      -- weights outside R grow: the same set does at least as well before
      refine ⟨s₀, hf, le_trans H.2.2 ?_⟩
      have k := h.attackValue_mul hf
      have p := h.z_pos hf
      have hφ : 1 ≤ (x.mean (x.tilt R))⁻¹ := le_of_mul_le hD (by rw [hDi]; exact le_trans (le_of_eq (by ring)) c)
      exact grow_step hU0 hm0 hφ hYv p hden k kv2
    | inr c =>
      -- weights outside R shrink by D: raise the fraction 1/D of the same set before
      have hφ0 : 0 ≤ (x.mean (x.tilt R))⁻¹ := inv_nonneg hD
      have hφ1 : (x.mean (x.tilt R))⁻¹ ≤ 1 := le_of_mul_le hD (by rw [hDi]; exact le_trans c (le_of_eq (by ring)))
      have hf' : IsFrac (fun t => (x.mean (x.tilt R))⁻¹ * s₀ t) := fun t =>
        ⟨nonneg_mul hφ0 (hf t).1, nonneg_cert (add_nonneg (sub_nonneg hφ1) (nonneg_mul hφ0 (hf t).2)) (by ring)⟩
      refine ⟨_, hf', le_trans H.2.2 ?_⟩
      have k := h.attackValue_mul hf'
      have p := h.z_pos hf'
      have e1 : x.up (fun t => (x.mean (x.tilt R))⁻¹ * s₀ t) = (x.mean (x.tilt R))⁻¹ * x.up s₀ :=
        (x.mean_congr (fun t => by ring)).trans (x.mean_mul _ (fun t => s₀ t * x.r t))
      have e2 : x.mean (fun t => (x.mean (x.tilt R))⁻¹ * s₀ t) = (x.mean (x.tilt R))⁻¹ * x.mean s₀ := x.mean_mul _ _
      -- lo of the new set: v - φ Σ w s/r, and lo s₀ = v - Σ w s/r
      have e3 : x.lo (fun t => (x.mean (x.tilt R))⁻¹ * s₀ t) = (1 - (x.mean (x.tilt R))⁻¹) * (x.mean (fun t => (1 - mask R t) * (x.r t)⁻¹) + x.mean (fun t => mask R t * (x.r t)⁻¹)) + (x.mean (x.tilt R))⁻¹ * x.lo s₀ := by
        rw [← mean_mask R (fun t => (x.r t)⁻¹)]
        refine (x.mean_congr (fun t => ?_)).trans (x.mean_lin (1 - (x.mean (x.tilt R))⁻¹) (x.mean (x.tilt R))⁻¹ (fun t => (x.r t)⁻¹) (fun t => (1 - s₀ t) * (x.r t)⁻¹))
        ring
      rw [e1, e2, e3] at k
      rw [e1, e3] at p
      rw [hDe] at c hDi hD hφ0 p k kv2 ⊢
      exact shrink_step hU0 hφ0 hDi c hvN hvρ p hden k kv2
end WitCert.Cell
