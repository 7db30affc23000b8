import WitCert.Algebra.Exp
import WitCert.Attention.Cell
/-!
# From logits to the ratio form

Exact logits `z`, compressed logits `z̃`, radii `c ≥ |z̃ - z|` give a sound cell whose `p` is the exact softmax. What
keeps a radius: any 1-Lipschitz map, the softcap in particular; what costs nothing: a common shift, a sink.
-/
set_option synthInstance.maxSize 4000
universe u v
namespace WitCert

/-! ### What keeps a radius -/
section
variable {α : Type u} [OrderedField α]
/-- **A 1-Lipschitz map keeps a radius.**

Code: `witcert_core.meter.tv.attention_logits` (a soft cap leaves `c` as it is).
`python: abs(clip(z_tilde[0]) - clip(z[0])) <= c[0]` -/
theorem lipschitz_keeps_radius {f : α → α} (hf : ∀ x y, abs (f x - f y) ≤ abs (x - y)) {z zt c : α} (hc : abs (zt - z) ≤ c) :
    abs (f zt - f z) ≤ c := le_trans (hf zt z) hc
/-- **Scaling.** If `f` is 1-Lipschitz, so is `z ↦ C f(z/C)`: the shape of a softcap with cap `C > 0`. -/
theorem lipschitz_scale {f : α → α} (hf : ∀ x y, abs (f x - f y) ≤ abs (x - y)) {C : α} (hC : 0 < C) (x y : α) :
    abs (C * f (x / C) - C * f (y / C)) ≤ abs (x - y) := by
  rw [show C * f (x / C) - C * f (y / C) = C * (f (x / C) - f (y / C)) from by ring, abs_mul_nonneg (le_of_lt hC)]
  refine le_trans (mul_le_mul_left (le_of_lt hC) (hf _ _)) (le_of_eq ?_)
  rw [← abs_mul_nonneg (le_of_lt hC)]
  exact congrArg abs (eq_lin (mul_inv_cancel hC) (x - y) (by ring))
/-- **A bias common to both logits cancels** (ALiBi, any additive mask).

Code: `witcert_core.cache.radii.radius_witness` (no term for ALiBi).
`python: (z_tilde[0] + bias) - (z[0] + bias) == z_tilde[0] - z[0]` -/
theorem bias_cancels (z zt b : α) : (zt + b) - (z + b) = zt - z := by ring
/-- **A query that is quantized too** adds its own error: `|⟨q̃,k̃⟩ - ⟨q,k⟩| ≤ |⟨q,k̃ - k⟩| + |⟨q̃ - q, k̃⟩|`.

Code: `witcert_core.cache.radii.radius_witness` (a quantized query adds this term).
`python: abs(dot(q_tilde, k_tilde) - dot(q, k)) <= abs(dot(q, sub(k_tilde, k))) + abs(dot(sub(q_tilde, q), k_tilde))` -/
theorem quantized_query {κ : Type v} (l : List κ) (q qt k kt : κ → α) :
    abs (sum (fun j => qt j * kt j) l - sum (fun j => q j * k j) l)
      ≤ abs (sum (fun j => q j * (kt j - k j)) l) + abs (sum (fun j => (qt j - q j) * kt j) l) := by
  refine le_trans (le_of_eq (congrArg abs ?_)) (abs_add _ _)
  rw [← sum_sub, ← sum_add]
  exact sum_congr l (fun j => by ring)
end

variable {α : Type u} [ExpField α] {ι : Type v}
/-- **The logit softcap keeps a radius** (Archimedean fields): `|C tanh(z̃/C) - C tanh(z/C)| ≤ c`.

Code: `witcert_core.meter.tv.attention_logits` (`logits_soft_cap`).
`python: abs(softcap(z_tilde[0]) - softcap(z[0])) <= c[0] + tiny` -/
theorem softcap_keeps_radius (arch : ∀ y : α, ∃ n, y ≤ ofNat n) {C z zt c : α} (hC : 0 < C) (hc : abs (zt - z) ≤ c) :
    abs (C * tanh (zt / C) - C * tanh (z / C)) ≤ c :=
  le_trans (lipschitz_scale (tanh_lipschitz arch) hC zt z) hc

/-! ### Softmax -/
def normaliser (z : ι → α) (l : List ι) : α := sum (fun t => exp (z t)) l
/-- `softmax z l t = e^{z_t} / Σ_{s ∈ l} e^{z_s}`. -/
def softmax (z : ι → α) (l : List ι) (t : ι) : α := exp (z t) / normaliser z l
theorem normaliser_pos (z : ι → α) (i : ι) (l : List ι) : 0 < normaliser z (.cons i l) :=
  lt_of_lt_of_le (exp_pos (z i)) (le_cert (sum_nonneg l (fun t => exp_nonneg (z t)))
    (by show exp (z i) + sum (fun t => exp (z t)) l - exp (z i) = _; ring))
theorem softmax_nonneg (z : ι → α) (i : ι) (l : List ι) (t : ι) : 0 ≤ softmax z (.cons i l) t :=
  div_nonneg (exp_nonneg _) (normaliser_pos z i l)
theorem softmax_sum (z : ι → α) (i : ι) (l : List ι) : sum (softmax z (.cons i l)) (.cons i l) = 1 := by
  rw [sum_congr (f := softmax z (.cons i l)) (.cons i l) (g := fun t => (normaliser z (.cons i l))⁻¹ * exp (z t))
    (fun t => (div_eq _ _).trans (mul_comm _ _)), sum_mul, mul_comm]
  exact mul_inv_cancel (normaliser_pos z i l)

/-- **A common shift of the logits cancels.**

Code: `witcert_core.meter.sums.accumulate` (log-sum-exp).
`python: close(softmax([x + bias for x in z]), softmax(z))` -/
theorem softmax_shift (z : ι → α) (s : α) (i : ι) (l : List ι) (t : ι) :
    softmax (fun t => z t + s) (.cons i l) t = softmax z (.cons i l) t := by
  have e : normaliser (fun t => z t + s) (.cons i l) = exp s * normaliser z (.cons i l) :=
    (sum_congr (.cons i l) (fun t => by rw [exp_add]; ring)).trans (sum_mul (exp s) (fun t => exp (z t)) (.cons i l))
  have hn := normaliser_pos z i l
  refine (eq_div (x := softmax z (.cons i l) t) (normaliser_pos (fun t => z t + s) i l) ?_).symm
  show softmax z (.cons i l) t * normaliser (fun t => z t + s) (.cons i l) = exp (z t + s)
  rw [e, exp_add]
  show exp (z t) / normaliser z (.cons i l) * (exp s * normaliser z (.cons i l)) = _
  exact eq_lin (mul_inv_cancel hn) (exp (z t) * exp s) (by ring)

/-- The cell of exact logits `z`, compressed logits `zt` and radii `c`. -/
def ofLogits (i : ι) (l : List ι) (z zt c : ι → α) : Cell α ι where
  l := .cons i l
  w := softmax zt (.cons i l)
  r := fun t => exp (c t)
  a := fun t => exp (z t - zt t)

/-- **Softmax weights with valid radii are a sound cell.**

Code: `witcert_core.meter.sums.accumulate`.
`python: sum(head.cell.w) == 1 and all(1 <= x * y and y <= x for x, y in zip(head.cell.r, head.cell.a))` -/
theorem ofLogits_sound (i : ι) (l : List ι) (z zt c : ι → α) (hc : ∀ t, abs (zt t - z t) ≤ c t) : (ofLogits i l z zt c).Sound where
  w_nonneg := softmax_nonneg zt i l
  w_sum := softmax_sum zt i l
  one_le_r := fun t => one_le_exp (le_trans (abs_nonneg _) (hc t))
  lower := fun t => by
    show 1 ≤ exp (c t) * exp (z t - zt t)
    rw [← exp_add]
    exact one_le_exp (nonneg_cert (sub_nonneg (le_trans (le_abs _) (hc t))) (by ring))
  upper := fun t => exp_mono (le_trans (le_trans (le_of_eq (by ring)) (neg_le_abs _)) (hc t))

/-- **The cell's `p` is the exact softmax**: `p̃ e^{-ε}/Σ p̃ e^{-ε} = softmax z`.

Code: `witcert_core.meter.tv.total_variation`.
`python: close(head.cell.p, softmax(z))` -/
theorem ofLogits_p (i : ι) (l : List ι) (z zt c : ι → α) (hc : ∀ t, abs (zt t - z t) ≤ c t) (t : ι) :
    (ofLogits i l z zt c).p t = softmax z (.cons i l) t := by
  have e : ∀ s, softmax zt (.cons i l) s * exp (z s - zt s) = (normaliser zt (.cons i l))⁻¹ * exp (z s) := fun s => by
    have h : exp (zt s) * exp (z s - zt s) = exp (z s) := by
      rw [← exp_add]; exact congrArg exp (by ring)
    show exp (zt s) / normaliser zt (.cons i l) * exp (z s - zt s) = _
    exact eq_lin h (normaliser zt (.cons i l))⁻¹ (by ring)
  have hZ : (ofLogits i l z zt c).Z = (normaliser zt (.cons i l))⁻¹ * normaliser z (.cons i l) :=
    (sum_congr (.cons i l) e).trans (sum_mul _ _ _)
  have hu := (ofLogits_sound i l z zt c hc).Zu
  rw [hZ] at hu
  have hn := mul_inv_cancel (normaliser_pos z i l)
  show softmax zt (.cons i l) t * exp (z t - zt t) / (ofLogits i l z zt c).Z = exp (z t) / normaliser z (.cons i l)
  rw [div_eq, div_eq, e t]
  show (normaliser zt (.cons i l))⁻¹ * exp (z t) * (ofLogits i l z zt c).u = _
  exact eq_lin2 hu hn (exp (z t) * (normaliser z (.cons i l))⁻¹) (-((normaliser zt (.cons i l))⁻¹ * exp (z t) * (ofLogits i l z zt c).u)) (by ring)

/-- **A sink is a token of radius 0**: a logit that both sides share has `r = a = 1`.

Code: `witcert_core.meter.sums.accumulate` (`sink_logits`).
`python: abs(eta_with_sink - eta_with_free_token) <= tiny * eta_with_free_token` -/
theorem sink_ratio (i : ι) (l : List ι) (z zt c : ι → α) (s : ι) (hs : zt s = z s) (hcs : c s = 0) :
    (ofLogits i l z zt c).r s = 1 ∧ (ofLogits i l z zt c).a s = 1 := by
  constructor
  · show exp (c s) = 1
    rw [hcs]; exact exp_zero
  · show exp (z s - zt s) = 1
    rw [hs, show z s - z s = 0 from by ring]; exact exp_zero
end WitCert
namespace WitCert.Cell
variable {α : Type u} [OrderedField α] {ι : Type v} {x : Cell α ι}
/-- **A common error of all logits moves nothing**: if every ratio is the same `κ`, then `TV = 0`.

Code: `witcert_core.meter.tv.total_variation`.
`python: tv(w, tilted(w, [kappa for _ in w])) == 0` -/
theorem Sound.tv_common_shift (h : x.Sound) (κ : α) (hk : ∀ t, x.a t = κ) : x.TV = 0 := by
  have hZ : x.Z = κ := (x.mean_congr hk).trans (h.mean_const κ)
  have hM : x.M = 0 := (x.mean_congr (g := fun _ => 0) (fun t => by
    rw [hk t, hZ, show κ - κ = 0 from by ring]; exact abs_of_nonneg (le_refl 0))).trans (h.mean_const 0)
  have e := h.tv2_eq_M
  rw [hM] at e
  exact eq_lin2 e two_half 2⁻¹ (-x.TV) (by ring)
end WitCert.Cell
