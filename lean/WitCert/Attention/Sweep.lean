import WitCert.Attention.Extremal
/-!
# The best share of a token

With all larger radii raised and all smaller ones lowered, the value along the tokens at one radius is
`(a + λb)/(d + λe) - α - λm` with `b = m e^c`, `e = m(e^c - e^{-c})`: concave in the share `λ`, stationary where
`(d + λe)² = e^c y + a e^{-c}` (`y` with the token lowered). The clipped stationary share is the best one.
-/
set_option synthInstance.maxSize 4000
universe u v
namespace WitCert
variable {α : Type u} [OrderedField α]

/-- **The clipped stationary share is optimal.** Let `z(λ) = d + λe > 0`, `be - …` as above in the form
`b d - a e = m s²`, `b = …` free. If `c` has `z(c) = s`, or `z(c) ≤ s` with `λ ≤ c`, or `s ≤ z(c)` with `c ≤ λ`, then
`(a + λb)/z(λ) - λm ≤ (a + cb)/z(c) - cm`.

Code: `witcert_core.meter.bounds.extremal._split`.
`python: all(attack_value(upper(x, s)) <= attack_value(upper(x, best_tau(x))) + tiny for x in set(r) for s in shares)` -/
theorem split_best {a b d e m s l c : α} (hm : 0 ≤ m) (he : 0 ≤ e) (hs : 0 ≤ s) (hroot : b * d - a * e = m * (s * s))
    (hzl : 0 < d + l * e) (hzc : 0 < d + c * e)
    (hc : d + c * e = s ∨ (l ≤ c ∧ d + c * e ≤ s) ∨ (c ≤ l ∧ s ≤ d + c * e)) :
    (a + l * b) / (d + l * e) - l * m ≤ (a + c * b) / (d + c * e) - c * m := by
  -- F(c) - F(l) = m (c - l)(s² - z(l) z(c)) / (z(l) z(c))
  have key : 0 ≤ m * ((c - l) * (s * s - (d + l * e) * (d + c * e))) := by
    refine nonneg_mul hm ?_
    cases hc with
    | inl h =>
      refine nonneg_cert (nonneg_mul (nonneg_mul hs he) (sq_nonneg (c - l))) ?_
      exact eq_lin h (-((c - l) * (s + (d + l * e))) + 0 + e * ((c - l) * (c - l))) (by rw [← h]; ring)
    | inr h => cases h with
      | inl h =>
        have k1 : 0 ≤ (c - l) * (s * (s - (d + c * e))) := nonneg_mul (sub_nonneg h.1) (nonneg_mul hs (sub_nonneg h.2))
        have k2 : 0 ≤ (c - l) * ((d + c * e) * (s - (d + c * e))) := nonneg_mul (sub_nonneg h.1) (nonneg_mul (le_of_lt hzc) (sub_nonneg h.2))
        have k3 : 0 ≤ (c - l) * ((c - l) * e * (d + c * e)) := nonneg_mul (sub_nonneg h.1) (nonneg_mul (nonneg_mul (sub_nonneg h.1) he) (le_of_lt hzc))
        exact nonneg_cert (add_nonneg (add_nonneg k1 k2) k3) (by ring)
      | inr h =>
        have k1 : 0 ≤ (l - c) * (s * (d + c * e - s)) := nonneg_mul (sub_nonneg h.1) (nonneg_mul hs (sub_nonneg h.2))
        have k2 : 0 ≤ (l - c) * ((d + c * e) * (d + c * e - s)) := nonneg_mul (sub_nonneg h.1) (nonneg_mul (le_of_lt hzc) (sub_nonneg h.2))
        have k3 : 0 ≤ (l - c) * ((l - c) * e * (d + c * e)) := nonneg_mul (sub_nonneg h.1) (nonneg_mul (nonneg_mul (sub_nonneg h.1) he) (le_of_lt hzc))
        exact nonneg_cert (add_nonneg (add_nonneg k1 k2) k3) (by ring)
  have e1 := mul_inv_cancel hzl
  have e2 := mul_inv_cancel hzc
  refine le_of_mul_le (mul_pos hzl hzc) ?_
  refine le_cert key ?_
  have f1 : (d + l * e) * ((a + l * b) / (d + l * e)) = a + l * b := mul_div_cancel hzl
  have f2 : (d + c * e) * ((a + c * b) / (d + c * e)) = a + c * b := mul_div_cancel hzc
  exact eq_lin3 f2 f1 hroot (d + l * e) (-(d + c * e)) (c - l) (by ring)

namespace Cell
variable {ι : Type v} {x : Cell α ι} (h : x.Sound)
include h
/-- **One value per radius is enough for the sweep.** At the threshold `θ` (with `i = 1/θ`), let `a`, `y` be the sums with
the tokens at `θ` lowered, `μ` their mass, `s² = θ y + a/θ`; the clipped share `c` is at least as good as any other.

Code: `witcert_core.meter.bounds.extremal.bound`.
`python: all(attack_value(upper(x, s)) <= attack_value(upper(x, best_tau(x))) + tiny for x in set(r) for s in shares) and max(attack_value(upper(x, best_tau(x))) for x in r) <= code("extremal")` -/
theorem Sound.upper_best {θ i s c τ : α} (hi : θ * i = 1) (hθ : 1 ≤ θ) (hs : 0 ≤ s)
    (hroot : s * s = θ * x.lo (x.upper θ 0) + x.up (x.upper θ 0) * i)
    (hτ : 0 ≤ τ ∧ 0 ≤ 1 - τ) (hc : 0 ≤ c ∧ 0 ≤ 1 - c)
    (hcl : x.up (x.upper θ 0) + x.lo (x.upper θ 0) + c * ((x.mean (x.upper θ 1) - x.mean (x.upper θ 0)) * (θ - i)) = s
      ∨ (τ ≤ c ∧ x.up (x.upper θ 0) + x.lo (x.upper θ 0) + c * ((x.mean (x.upper θ 1) - x.mean (x.upper θ 0)) * (θ - i)) ≤ s)
      ∨ (c ≤ τ ∧ s ≤ x.up (x.upper θ 0) + x.lo (x.upper θ 0) + c * ((x.mean (x.upper θ 1) - x.mean (x.upper θ 0)) * (θ - i)))) :
    x.attackValue (x.upper θ τ) ≤ x.attackValue (x.upper θ c) := by
  -- at the level θ the sums are affine in the share
  have hii : ∀ t, x.r t = θ → (x.r t)⁻¹ = i := fun t e => by
    have k := h.r_inv t
    rw [e] at k ⊢
    exact eq_lin2 k hi i (-θ⁻¹) (by ring)
  have dU : ∀ τ, x.up (x.upper θ τ) = x.up (x.upper θ 0) + τ * ((x.mean (x.upper θ 1) - x.mean (x.upper θ 0)) * θ) := fun τ => by
    rw [← mean_sub]
    show x.mean (fun t => x.upper θ τ t * x.r t) = x.mean (fun t => x.upper θ 0 t * x.r t) + τ * (x.mean (fun t => x.upper θ 1 t - x.upper θ 0 t) * θ)
    rw [show τ * (x.mean (fun t => x.upper θ 1 t - x.upper θ 0 t) * θ) = τ * θ * x.mean (fun t => x.upper θ 1 t - x.upper θ 0 t) from by ring, ← mean_mul, ← mean_add]
    refine x.mean_congr (fun t => ?_)
    rw [x.upper_mix θ τ t]
    cases x.upper_cases θ 0 t with
    | inl k => rw [x.upper_above k.1, x.upper_above k.1]; ring
    | inr k => cases k with
      | inl k => rw [k.1]; ring
      | inr k => rw [x.upper_below k.1, x.upper_below k.1]; ring
  have dL : ∀ τ, x.lo (x.upper θ τ) = x.lo (x.upper θ 0) - τ * ((x.mean (x.upper θ 1) - x.mean (x.upper θ 0)) * i) := fun τ => by
    rw [← mean_sub]
    show x.mean (fun t => (1 - x.upper θ τ t) * (x.r t)⁻¹) = x.mean (fun t => (1 - x.upper θ 0 t) * (x.r t)⁻¹) - τ * (x.mean (fun t => x.upper θ 1 t - x.upper θ 0 t) * i)
    rw [show τ * (x.mean (fun t => x.upper θ 1 t - x.upper θ 0 t) * i) = τ * i * x.mean (fun t => x.upper θ 1 t - x.upper θ 0 t) from by ring, ← mean_mul, ← mean_sub]
    refine x.mean_congr (fun t => ?_)
    rw [x.upper_mix θ τ t]
    cases x.upper_cases θ 0 t with
    | inl k => rw [x.upper_above k.1, x.upper_above k.1]; ring
    | inr k => cases k with
      | inl k => rw [hii t k.1]; ring
      | inr k => rw [x.upper_below k.1, x.upper_below k.1]; ring
  have dM : ∀ τ, x.mean (x.upper θ τ) = x.mean (x.upper θ 0) + τ * (x.mean (x.upper θ 1) - x.mean (x.upper θ 0)) := fun τ => by
    rw [← mean_sub, ← mean_mul, ← mean_add]
    exact x.mean_congr (fun t => by rw [x.upper_mix θ τ t]; ring)
  have hm : 0 ≤ x.mean (x.upper θ 1) - x.mean (x.upper θ 0) := by
    rw [← mean_sub]
    refine h.mean_nonneg (fun t => ?_)
    cases x.upper_cases θ 0 t with
    | inl k => rw [x.upper_above k.1, x.upper_above k.1]; exact le_of_eq (by ring)
    | inr k => cases k with
      | inl k => rw [x.upper_one (le_of_eq k.1.symm), x.upper_zero (le_of_eq k.1)]; exact nonneg_cert zero_le_one (by ring)
      | inr k => rw [x.upper_below k.1, x.upper_below k.1]; exact le_of_eq (by ring)
  have hiθ : 0 ≤ θ - i := nonneg_of_mul (lt_of_one_le hθ) (nonneg_cert (nonneg_mul (sub_nonneg hθ) (add_nonneg (le_trans zero_le_one hθ) zero_le_one)) (eq_lin hi (-1) (by ring)))
  have pz : ∀ τ, 0 ≤ τ ∧ 0 ≤ 1 - τ → 0 < x.up (x.upper θ 0) + x.lo (x.upper θ 0) + τ * ((x.mean (x.upper θ 1) - x.mean (x.upper θ 0)) * (θ - i)) := fun τ ht => by
    refine lt_of_lt_of_le (h.z_pos (x.upper_isFrac (θ := θ) ht.1 ht.2)) (le_of_eq ?_)
    rw [dU, dL]; ring
  have sb := split_best (a := x.up (x.upper θ 0)) (b := (x.mean (x.upper θ 1) - x.mean (x.upper θ 0)) * θ) (d := x.up (x.upper θ 0) + x.lo (x.upper θ 0))
    (e := (x.mean (x.upper θ 1) - x.mean (x.upper θ 0)) * (θ - i)) (m := x.mean (x.upper θ 1) - x.mean (x.upper θ 0)) (s := s) (l := τ) (c := c)
    hm (nonneg_mul hm hiθ) hs (eq_lin hroot (-(x.mean (x.upper θ 1) - x.mean (x.upper θ 0))) (by ring)) (pz τ hτ) (pz c hc) hcl
  have val : ∀ τ, x.attackValue (x.upper θ τ) = (x.up (x.upper θ 0) + τ * ((x.mean (x.upper θ 1) - x.mean (x.upper θ 0)) * θ))
      / (x.up (x.upper θ 0) + x.lo (x.upper θ 0) + τ * ((x.mean (x.upper θ 1) - x.mean (x.upper θ 0)) * (θ - i))) - τ * (x.mean (x.upper θ 1) - x.mean (x.upper θ 0)) - x.mean (x.upper θ 0) := fun τ => by
    show x.up (x.upper θ τ) / (x.up (x.upper θ τ) + x.lo (x.upper θ τ)) - x.mean (x.upper θ τ) = _
    rw [dU τ, dL τ, dM τ, show x.up (x.upper θ 0) + τ * ((x.mean (x.upper θ 1) - x.mean (x.upper θ 0)) * θ) + (x.lo (x.upper θ 0) - τ * ((x.mean (x.upper θ 1) - x.mean (x.upper θ 0)) * i))
      = x.up (x.upper θ 0) + x.lo (x.upper θ 0) + τ * ((x.mean (x.upper θ 1) - x.mean (x.upper θ 0)) * (θ - i)) from by ring]
    ring
  rw [val τ, val c]
  exact le_cert (sub_nonneg sb) (by ring)
end Cell
end WitCert
