import WitCert.Algebra.Sum
/-!
# One attention cell, in ratio form

A *cell* is one (request, layer, query head, query row). Compressed attention has weights `w_t` (`p̃_t` in the code);
with `ε_t` the error of logit `t` and `c_t ≥ |ε_t|` its radius, put `a_t = e^{-ε_t}` and `r_t = e^{c_t}`. Then
`1/r_t ≤ a_t ≤ r_t`, exact attention is `p_t = w_t a_t / Σ_s w_s a_s`, and everything from radii to total variation
is algebra over an ordered field: no exponential is left.
-/
set_option synthInstance.maxSize 4000
universe u v
namespace WitCert

/-- Data of a cell: tokens, compressed weights `w`, radii `r = e^c`, true ratios `a = e^{-ε}` (unknown to the meter). -/
structure Cell (α : Type u) (ι : Type v) where
  l : List ι
  w : ι → α
  r : ι → α
  a : ι → α

namespace Cell
variable {α : Type u} [OrderedField α] {ι : Type v}

/-- What the meter assumes: `w` are weights, and the radius of every token is valid (`e^{-c} ≤ a ≤ e^c`). -/
structure Sound (x : Cell α ι) : Prop where
  w_nonneg : ∀ t, 0 ≤ x.w t
  w_sum : sum x.w x.l = 1
  one_le_r : ∀ t, 1 ≤ x.r t
  lower : ∀ t, 1 ≤ x.r t * x.a t
  upper : ∀ t, x.a t ≤ x.r t

section
variable (x : Cell α ι)
/-- Weighted mean `Σ w f`. -/
def mean (f : ι → α) : α := sum (fun t => x.w t * f t) x.l
/-- `Z = Σ w a`. -/
def Z : α := x.mean x.a
/-- `A = Σ w e^c = 1 + η`. -/
def A : α := x.mean x.r
/-- `η = Σ w (e^c - 1)`. -/
def eta : α := x.mean (fun t => x.r t - 1)
/-- `Q = Σ w (e^c - 1)²`. -/
def Q : α := x.mean (fun t => (x.r t - 1) * (x.r t - 1))
/-- Exact attention weights. -/
def p (t : ι) : α := x.w t * x.a t / x.Z
/-- Total variation `½ Σ |p - w|` between exact and compressed attention. -/
def TV : α := sum (fun t => abs (x.p t - x.w t)) x.l / 2
/-- `1/Z`. -/
def u : α := x.Z⁻¹
/-- Mean absolute deviation of the ratios: `TV = u·M/2`. -/
def M : α := x.mean (fun t => abs (x.a t - x.Z))

theorem p_eq (t : ι) : x.p t = x.u * (x.w t * x.a t) := by
  show x.w t * x.a t / x.Z = _
  rw [div_eq]
  exact mul_comm _ _
theorem mean_lin (c d : α) (f g : ι → α) :
    x.mean (fun t => c * f t + d * g t) = c * x.mean f + d * x.mean g :=
  (sum_congr x.l (g := fun t => c * (x.w t * f t) + d * (x.w t * g t)) (fun _ => by ring)).trans (sum_lin2 c d _ _ x.l)
theorem mean_congr {f g : ι → α} (h : ∀ t, f t = g t) : x.mean f = x.mean g :=
  sum_congr x.l (fun t => by rw [h t])
theorem mean_mul (c : α) (f : ι → α) : x.mean (fun t => c * f t) = c * x.mean f :=
  (sum_congr x.l (g := fun t => c * (x.w t * f t)) (fun _ => by ring)).trans (sum_mul c _ x.l)
theorem mean_add (f g : ι → α) : x.mean (fun t => f t + g t) = x.mean f + x.mean g :=
  (sum_congr x.l (fun _ => by ring)).trans (sum_add (fun t => x.w t * f t) (fun t => x.w t * g t) x.l)
theorem mean_sub (f g : ι → α) : x.mean (fun t => f t - g t) = x.mean f - x.mean g :=
  (sum_congr x.l (fun _ => by ring)).trans (sum_sub (fun t => x.w t * f t) (fun t => x.w t * g t) x.l)
end

namespace Sound
variable {x : Cell α ι} (h : x.Sound)
include h

theorem r_pos (t : ι) : 0 < x.r t := lt_of_one_le (h.one_le_r t)
theorem a_nonneg (t : ι) : 0 ≤ x.a t := nonneg_of_mul (h.r_pos t) (le_trans zero_le_one (h.lower t))
theorem inv_r_nonneg (t : ι) : 0 ≤ (x.r t)⁻¹ := inv_nonneg (h.r_pos t)
theorem inv_r_le_a (t : ι) : (x.r t)⁻¹ ≤ x.a t :=
  le_of_mul_le (h.r_pos t) (by rw [mul_inv_cancel (h.r_pos t)]; exact h.lower t)
theorem mean_const (c : α) : x.mean (fun _ => c) = c := by
  show sum (fun t => x.w t * c) x.l = c
  rw [sum_congr x.l (g := fun t => c * x.w t) (fun t => by ring), sum_mul, h.w_sum]
  ring
/-- Mean of an affine combination. -/
theorem mean_lin2 (c d e : α) (f g : ι → α) :
    x.mean (fun t => c * f t + d * g t + e) = c * x.mean f + d * x.mean g + e := by
  rw [mean_add, mean_lin, h.mean_const]
theorem mean_le {f g : ι → α} (hfg : ∀ t, f t ≤ g t) : x.mean f ≤ x.mean g :=
  sum_le x.l (fun t => mul_le_mul_left (h.w_nonneg t) (hfg t))
theorem mean_nonneg {f : ι → α} (hf : ∀ t, 0 ≤ f t) : 0 ≤ x.mean f :=
  sum_nonneg x.l (fun t => nonneg_mul (h.w_nonneg t) (hf t))

theorem A_eq : x.A = 1 + x.eta :=
  (x.mean_congr (g := fun t => 1 * (x.r t - 1) + 0 * x.r t + 1) (fun _ => by ring)).trans
    ((h.mean_lin2 1 0 1 (fun t => x.r t - 1) x.r).trans (by
      show 1 * x.eta + 0 * x.A + 1 = 1 + x.eta
      ring))
theorem Z_le_A : x.Z ≤ x.A := h.mean_le h.upper
theorem one_le_A : 1 ≤ x.A := by
  have h1 := h.mean_le h.one_le_r
  rw [h.mean_const 1] at h1
  exact h1
theorem eta_nonneg : 0 ≤ x.eta := h.mean_nonneg (fun t => sub_nonneg (h.one_le_r t))
theorem Q_nonneg : 0 ≤ x.Q := h.mean_nonneg (fun t => sq_nonneg (x.r t - 1))
theorem A_pos : 0 < x.A := lt_of_one_le h.one_le_A
theorem A_le {R : α} (hR : ∀ t, x.r t ≤ R) : x.A ≤ R := by
  have h1 := h.mean_le hR
  rw [h.mean_const] at h1
  exact h1

/-- A weighted Cauchy–Schwarz: with `1 ≤ f g` pointwise, `1 ≤ (Σ w f)(Σ w g)`. -/
theorem one_le_mean_mul {f g : ι → α} (hf : ∀ t, 0 < f t) (hfg : ∀ t, 1 ≤ f t * g t) (hF : 0 < x.mean f) :
    1 ≤ x.mean f * x.mean g := by
  have h1 := h.mean_le (fun t => tangent (x.mean f) (hf t) (hfg t))
  rw [h.mean_const, x.mean_congr (f := fun t => x.mean f * x.mean f * g t + f t)
    (g := fun t => x.mean f * x.mean f * g t + 1 * f t + 0) (fun t => by ring), h.mean_lin2] at h1
  exact le_of_mul_le hF (le_cert (sub_nonneg h1) (by ring))
theorem one_le_AZ : 1 ≤ x.A * x.Z := h.one_le_mean_mul h.r_pos h.lower h.A_pos
theorem Z_pos : 0 < x.Z := by
  have h0 : 0 ≤ x.Z := nonneg_of_mul h.A_pos (le_trans zero_le_one h.one_le_AZ)
  refine lt_of_le_of_ne h0 (fun e => ?_)
  have h1 := h.one_le_AZ
  rw [e, show x.A * 0 = 0 from by ring] at h1
  exact zero_lt_one h1
theorem Zu : x.Z * x.u = 1 := mul_inv_cancel h.Z_pos
theorem u_nonneg : 0 ≤ x.u := inv_nonneg h.Z_pos
theorem u_le_A : x.u ≤ x.A :=
  le_cert (nonneg_mul h.u_nonneg (sub_nonneg h.one_le_AZ)) (eq_lin h.Zu (-x.A) (by ring))
theorem one_le_Au : 1 ≤ x.A * x.u :=
  le_cert (nonneg_mul h.u_nonneg (sub_nonneg h.Z_le_A)) (eq_lin h.Zu 1 (by ring))

theorem p_nonneg (t : ι) : 0 ≤ x.p t := by
  rw [x.p_eq]
  exact nonneg_mul h.u_nonneg (nonneg_mul (h.w_nonneg t) (h.a_nonneg t))
theorem p_sum : sum x.p x.l = 1 := by
  rw [sum_congr x.l x.p_eq, sum_mul, mul_comm]
  exact h.Zu
theorem p_sub_w (t : ι) : abs (x.p t - x.w t) = x.w t * abs (x.a t * x.u - 1) := by
  rw [← abs_mul_nonneg (h.w_nonneg t), x.p_eq]
  exact congrArg abs (by ring)
theorem tv2_eq : 2 * x.TV = x.mean (fun t => abs (x.a t * x.u - 1)) :=
  (mul_div_cancel zero_lt_two).trans (sum_congr x.l h.p_sub_w)
theorem tv2_eq_M : 2 * x.TV = x.u * x.M := by
  rw [h.tv2_eq]
  refine (x.mean_congr (fun t => ?_)).trans (x.mean_mul x.u (fun t => abs (x.a t - x.Z)))
  rw [show x.a t * x.u - 1 = x.u * (x.a t - x.Z) from eq_lin h.Zu 1 (by ring), abs_mul_nonneg h.u_nonneg]
theorem M_nonneg : 0 ≤ x.M := h.mean_nonneg (fun _ => abs_nonneg _)
theorem TV_nonneg : 0 ≤ x.TV := nonneg_of_mul zero_lt_two (by rw [h.tv2_eq_M]; exact nonneg_mul h.u_nonneg h.M_nonneg)
/-- The second moment bounds the square of the first. -/
theorem mean_sq_le (f : ι → α) : x.mean f * x.mean f ≤ x.mean (fun t => f t * f t) := by
  have h1 : 0 ≤ 1 * x.mean (fun t => f t * f t) + -(2 * x.mean f) * x.mean f + x.mean f * x.mean f := by
    rw [← h.mean_lin2 1 (-(2 * x.mean f)) (x.mean f * x.mean f) (fun t => f t * f t) f]
    exact h.mean_nonneg (fun t => nonneg_cert (sq_nonneg (f t - x.mean f)) (by ring))
  exact le_cert h1 (by ring)
end Sound
end Cell
end WitCert
