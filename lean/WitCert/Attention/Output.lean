import WitCert.Attention.Forms
import WitCert.Attention.Witness
/-!
# The output bound

`õ = Σ w ṽ` is what compressed attention returns, `o = Σ p v` what exact attention would, and `ρ_t ≥ ‖ṽ_t - v_t‖`.
`‖o - õ‖ ≤ X + Σ w ρ`, with `X` from the diameter of the values or from their covariance. Vectors are functions of a
coordinate, norms are `NormLe`; no square root is taken. A sink is a token with `ṽ = 0` and `ρ = 0`.
-/
set_option synthInstance.maxSize 4000
universe u v w
namespace WitCert
variable {α : Type u} [OrderedField α] {ι : Type v} {κ : Type w}

theorem NormLe.sum {k : List κ} (l : List ι) {v : ι → κ → α} {ρ : ι → α} (h : ∀ t, NormLe k (v t) (ρ t)) :
    NormLe k (fun j => WitCert.sum (fun t => v t j) l) (WitCert.sum ρ l) := by
  induction l with
  | nil => exact NormLe.zero k
  | cons t l ih => exact (h t).add ih
theorem sum_eq_zero_all {f : ι → α} (hf : ∀ i, 0 ≤ f i) (l : List ι) (h : sum f l = 0) : AllOf (fun i => f i = 0) l := by
  induction l with
  | nil => exact True.intro
  | cons i l ih =>
    have h0 := sum_nonneg l hf
    have e : f i + sum f l = 0 := h
    have e1 : f i = 0 := le_antisymm (le_cert h0 (eq_lin e (-1) (by ring))) (hf i)
    refine ⟨e1, ih ?_⟩
    rw [e1] at e
    exact eq_lin e 1 (by ring)

/-- **Diameter from a centre.** `‖ṽ_t - c‖ ≤ r` for all `t` gives `‖ṽ_s - ṽ_t‖ ≤ 2r`, for any centre `c`.

Code: `witcert_core.meter.sums.AccField.V_RADIUS`.
`python: all(norm_sq(sub(x, v)) <= (2 * v_radius) ** 2 for x in values for v in values)` -/
theorem diam_le_centre (k : List κ) (v : ι → κ → α) (c : κ → α) (r : α) (h : ∀ t, NormLe k (fun j => v t j - c j) r) (s t : ι) :
    NormLe k (fun j => v s j - v t j) (2 * r) :=
  (((h s).add ((h t).smul (-1))).congr (fun j => by ring)).round_up (le_of_eq (by
    rw [abs_neg, abs_of_nonneg zero_le_one]; ring))

/-- **The value radius of INT8.** Channels of group `g` have `|ṽ - v| ≤ s_g/2`; with at most `N` channels a group,
`ρ² ≥ Σ_g N (s_g/2)²` is enough: `ρ = ½√(Σ_g 32 s_g²)`.

Code: `witcert_core.meter.output.output_bound` (`RHO1` of the INT8 cache).
`python: norm_sq(residual) <= sum(len(group(residual, j)) * (steps[j] / 2) ** 2 for j in groups)` -/
theorem value_radius (groups : List ι) (chan : ι → List κ) (e : ι → κ → α) (s : ι → α) (N : α)
    (hs : ∀ g, 0 ≤ s g) (he : ∀ g j, abs (e g j) ≤ s g / 2) (hN : ∀ g, sum (fun _ => (1 : α)) (chan g) ≤ N) :
    sum (fun g => dot (chan g) (e g) (e g)) groups ≤ sum (fun g => N * (s g / 2 * (s g / 2))) groups :=
  sum_le groups (fun g => by
    have h0 : 0 ≤ s g / 2 := div_nonneg (hs g) zero_lt_two
    have h1 : dot (chan g) (e g) (e g) ≤ sum (fun _ => s g / 2 * (s g / 2)) (chan g) := sum_le (chan g) (fun j => by
      rw [← abs_mul_self]; exact mul_le_mul (abs_nonneg _) h0 (he g j) (he g j))
    rw [sum_const_mul] at h1
    exact le_trans h1 (le_cert (nonneg_mul (nonneg_mul h0 h0) (sub_nonneg (hN g))) (by ring)))

/-! ### Two weight vectors -/

/-- Total variation `½ Σ |p - w|`. -/
def tv (p w : ι → α) (l : List ι) : α := sum (fun t => abs (p t - w t)) l / 2
theorem tv_nonneg (p w : ι → α) (l : List ι) : 0 ≤ tv p w l := div_nonneg (sum_nonneg l (fun _ => abs_nonneg _)) zero_lt_two
/-- **Triangle inequality**: `TV(p, ŵ) ≤ TV(p, w) + TV(w, ŵ)`. Weights that the kernel used but the meter did not see add
their own distance.

Code: `witcert_core.meter.measure.measure` (unfused: the kernel's distance is a last term).
`python: tv(head.cell.p, w2) <= tv(head.cell.p, head.cell.w) + tv(head.cell.w, w2)` -/
theorem tv_triangle (p w w' : ι → α) (l : List ι) : tv p w' l ≤ tv p w l + tv w w' l := by
  have h : sum (fun t => abs (p t - w' t)) l ≤ sum (fun t => abs (p t - w t)) l + sum (fun t => abs (w t - w' t)) l := by
    rw [← sum_add]
    exact sum_le l (fun t => le_trans (le_of_eq (congrArg abs (by ring))) (abs_add (p t - w t) (w t - w' t)))
  refine div_le zero_lt_two (le_trans h (le_of_eq ?_))
  show _ = (sum (fun t => abs (p t - w t)) l / 2 + sum (fun t => abs (w t - w' t)) l / 2) * 2
  exact eq_lin two_half (-(sum (fun t => abs (p t - w t)) l) - sum (fun t => abs (w t - w' t)) l) (by ring)

/-- **The floor of a sketched cell**: `TV(ŵ, w) - TV(p, ŵ) ≤ TV(p, w)`. With `ŵ` the weights of the corrected keys, the first
term is computed and the second bounded, so damage can be certain.

Code: `witcert_core.meter.cells.bounds_of` (`floor`).
`python: tv(w2, head.cell.w) - tv(head.cell.p, w2) <= tv(head.cell.p, head.cell.w)` -/
theorem tv_floor (p w w' : ι → α) (l : List ι) : tv w' w l - tv p w' l ≤ tv p w l := by
  have hs : tv w' p l = tv p w' l :=
    congrArg (· / 2) (sum_congr l (fun t => by rw [← abs_neg (p t - w' t)]; exact congrArg abs (by ring)))
  have h := tv_triangle w' p w l
  rw [hs] at h
  exact le_cert (sub_nonneg h) (by ring)

/-- The positive and the negative part of `p - w` both have mass `TV`. -/
theorem tv_parts {p w : ι → α} {l : List ι} (hs : sum p l = sum w l) : sum (fun t => (abs (p t - w t) + (p t - w t)) / 2) l = tv p w l ∧
    sum (fun t => (abs (p t - w t) - (p t - w t)) / 2) l = tv p w l := by
  have e0 : sum (fun t => p t - w t) l = 0 := by
    rw [sum_sub, hs]; ring
  constructor
  · rw [sum_congr l (g := fun t => 2⁻¹ * abs (p t - w t) + 2⁻¹ * (p t - w t)) (fun t => by ring), sum_lin2, e0]
    show _ = sum _ l / 2
    ring
  · rw [sum_congr l (g := fun t => 2⁻¹ * abs (p t - w t) + -2⁻¹ * (p t - w t)) (fun t => by ring), sum_lin2, e0]
    show _ = sum _ l / 2
    ring
theorem parts_split (d : α) : (abs d + d) / 2 - (abs d - d) / 2 = d := eq_lin two_half d (by ring)
theorem parts_nonneg (d : α) : 0 ≤ (abs d + d) / 2 ∧ 0 ≤ (abs d - d) / 2 :=
  ⟨div_nonneg (nonneg_cert (sub_nonneg (neg_le_abs d)) (by ring)) zero_lt_two, div_nonneg (sub_nonneg (le_abs d)) zero_lt_two⟩

/-- **Moving mass inside a set of diameter `D`** moves the mean by at most `TV·D`: `‖Σ (p - w) v‖ ≤ TV(p, w)·D`.

Code: `witcert_core.meter.output.output_bound` (and its `extra_tv`).
`python: norm_sq(mean_shift) <= (head.cell.TV * diam) ** 2` -/
theorem transport {p w : ι → α} {l : List ι} (hs : sum p l = sum w l) (k : List κ) (v : ι → κ → α) (D : α)
    (hD : ∀ s t, NormLe k (fun j => v s j - v t j) D) (hD0 : 0 ≤ D) :
    NormLe k (fun j => sum (fun t => (p t - w t) * v t j) l) (tv p w l * D) := by
  cases le_or_lt (tv p w l) 0 with
  | inl hz =>
    have e0 : tv p w l = 0 := le_antisymm hz (tv_nonneg p w l)
    have e1 : sum (fun t => abs (p t - w t)) l = 0 := by
      have e2 : sum (fun t => abs (p t - w t)) l / 2 = 0 := e0
      exact eq_lin2 e2 two_half 2 (-(sum (fun t => abs (p t - w t)) l)) (by ring)
    have ha := sum_eq_zero_all (fun t => abs_nonneg (p t - w t)) l e1
    have ez : ∀ j, sum (fun t => (p t - w t) * v t j) l = 0 := fun j => by
      refine (sum_congr_all l (g := fun _ => 0) (AllOf.imp l (fun t ht => ?_) ha)).trans (sum_zero l)
      have e3 : p t - w t = 0 := by
        have q : -(p t - w t) ≤ 0 := le_trans (neg_le_abs (p t - w t)) (le_of_eq ht)
        exact le_antisymm (le_trans (le_abs _) (le_of_eq ht)) (le_cert (sub_nonneg q) (by ring))
      show (p t - w t) * v t j = 0
      rw [e3]; ring
    exact ((NormLe.zero k).congr ez).round_up (nonneg_mul (tv_nonneg p w l) hD0)
  | inr hp =>
    have pr := tv_parts hs
    have n1 : NormLe k (fun j => sum (fun s => sum (fun t => ((abs (p s - w s) + (p s - w s)) / 2 * ((abs (p t - w t) - (p t - w t)) / 2)) * (v s j - v t j)) l) l)
        (sum (fun s => sum (fun t => ((abs (p s - w s) + (p s - w s)) / 2 * ((abs (p t - w t) - (p t - w t)) / 2)) * D) l) l) :=
      NormLe.sum l (fun s => NormLe.sum l (fun t => by
        have q := (hD s t).smul ((abs (p s - w s) + (p s - w s)) / 2 * ((abs (p t - w t) - (p t - w t)) / 2))
        rw [abs_of_nonneg (nonneg_mul (parts_nonneg _).1 (parts_nonneg _).2)] at q
        exact q))
    have e1 : sum (fun s => sum (fun t => ((abs (p s - w s) + (p s - w s)) / 2 * ((abs (p t - w t) - (p t - w t)) / 2)) * D) l) l = tv p w l * tv p w l * D := by
      rw [sum_congr l (g := fun s => tv p w l * D * ((abs (p s - w s) + (p s - w s)) / 2)) (fun s => by
        rw [sum_congr l (g := fun t => ((abs (p s - w s) + (p s - w s)) / 2 * D) * ((abs (p t - w t) - (p t - w t)) / 2)) (fun t => by ring), sum_mul, pr.2]
        ring), sum_mul, pr.1]
      ring
    have e2 : ∀ j, tv p w l * sum (fun t => (p t - w t) * v t j) l
        = sum (fun s => sum (fun t => ((abs (p s - w s) + (p s - w s)) / 2 * ((abs (p t - w t) - (p t - w t)) / 2)) * (v s j - v t j)) l) l := fun j => by
      have hin : ∀ s, sum (fun t => ((abs (p s - w s) + (p s - w s)) / 2 * ((abs (p t - w t) - (p t - w t)) / 2)) * (v s j - v t j)) l
          = tv p w l * ((abs (p s - w s) + (p s - w s)) / 2 * v s j) + -(sum (fun t => (abs (p t - w t) - (p t - w t)) / 2 * v t j) l) * ((abs (p s - w s) + (p s - w s)) / 2) := fun s => by
        rw [sum_congr l (g := fun t => ((abs (p s - w s) + (p s - w s)) / 2 * v s j) * ((abs (p t - w t) - (p t - w t)) / 2)
          + -((abs (p s - w s) + (p s - w s)) / 2) * ((abs (p t - w t) - (p t - w t)) / 2 * v t j)) (fun t => by ring), sum_lin2, pr.2]
        ring
      rw [sum_congr l hin, sum_lin2, pr.1]
      have e3 : sum (fun t => (p t - w t) * v t j) l = sum (fun t => (abs (p t - w t) + (p t - w t)) / 2 * v t j) l
          - sum (fun t => (abs (p t - w t) - (p t - w t)) / 2 * v t j) l := by
        rw [← sum_sub]
        exact sum_congr l (fun t => eq_lin (parts_split (p t - w t)) (-(v t j)) (by ring))
      rw [e3]; ring
    rw [e1] at n1
    have n2 := (n1.congr e2).smul (tv p w l)⁻¹
    rw [abs_of_nonneg (inv_nonneg hp)] at n2
    exact (n2.congr (fun j => eq_lin (mul_inv_cancel hp) (-(sum (fun t => (p t - w t) * v t j) l)) (by ring))).round_up
      (le_of_eq (eq_lin (mul_inv_cancel hp) (tv p w l * D) (by ring)))

namespace Cell
variable {x : Cell α ι} (h : x.Sound)
include h

/-- The part of the error that comes from the values themselves: `‖Σ p (v - ṽ)‖ ≤ Σ w ρ + Σ (p - w) ρ`. -/
theorem Sound.value_part (k : List κ) (vt ve : ι → κ → α) (ρ : ι → α) (hρ : ∀ t, NormLe k (fun j => ve t j - vt t j) (ρ t)) :
    NormLe k (fun j => sum (fun t => x.p t * (ve t j - vt t j)) x.l) (sum (fun t => x.w t * ρ t) x.l + sum (fun t => (x.p t - x.w t) * ρ t) x.l) := by
  have n := NormLe.sum x.l (fun t => (hρ t).smul (x.p t))
  refine n.round_up (le_of_eq ?_)
  rw [← sum_add]
  exact sum_congr x.l (fun t => by rw [abs_of_nonneg (h.p_nonneg t)]; ring)
omit h in
theorem output_split (k : List κ) (vt ve : ι → κ → α) {X Y : α}
    (hX : NormLe k (fun j => sum (fun t => (x.p t - x.w t) * vt t j) x.l) X)
    (hY : NormLe k (fun j => sum (fun t => x.p t * (ve t j - vt t j)) x.l) Y) :
    NormLe k (fun j => sum (fun t => x.p t * ve t j) x.l - sum (fun t => x.w t * vt t j) x.l) (X + Y) :=
  (hX.add hY).congr (fun j => by
    rw [← sum_sub, ← sum_add]
    exact sum_congr x.l (fun t => by ring))

/-- **Output bound, diameter form.** `‖o - õ‖ ≤ TV·(diam ṽ + max ρ - min ρ) + Σ w ρ`.

Code: `witcert_core.meter.output.output_bound`.
`python: norm_sq(output_error) <= (head.cell.TV * (diam + max(rho) - min(rho)) + dot(head.cell.w, rho)) ** 2` -/
theorem Sound.output_diam (k : List κ) (vt ve : ι → κ → α) (ρ : ι → α) (D ρmax ρmin : α) (hD0 : 0 ≤ D)
    (hD : ∀ s t, NormLe k (fun j => vt s j - vt t j) D) (hρ : ∀ t, NormLe k (fun j => ve t j - vt t j) (ρ t))
    (hmax : ∀ t, ρ t ≤ ρmax) (hmin : ∀ t, ρmin ≤ ρ t) :
    NormLe k (fun j => sum (fun t => x.p t * ve t j) x.l - sum (fun t => x.w t * vt t j) x.l)
      (x.TV * (D + (ρmax - ρmin)) + sum (fun t => x.w t * ρ t) x.l) := by
  refine (output_split k vt ve (transport (h.p_sum.trans h.w_sum.symm) k vt D hD hD0) (h.value_part k vt ve ρ hρ)).round_up ?_
  show x.TV * D + (sum (fun t => x.w t * ρ t) x.l + sum (fun t => (x.p t - x.w t) * ρ t) x.l) ≤ _
  have pr : _ = x.TV ∧ _ = x.TV := tv_parts (h.p_sum.trans h.w_sum.symm)
  have h1 : sum (fun t => (x.p t - x.w t) * ρ t) x.l ≤ sum (fun t => ρmax * ((abs (x.p t - x.w t) + (x.p t - x.w t)) / 2) + -ρmin * ((abs (x.p t - x.w t) - (x.p t - x.w t)) / 2)) x.l :=
    sum_le x.l (fun t => le_cert (add_nonneg (nonneg_mul (parts_nonneg (x.p t - x.w t)).1 (sub_nonneg (hmax t))) (nonneg_mul (parts_nonneg (x.p t - x.w t)).2 (sub_nonneg (hmin t))))
      (eq_lin (parts_split (x.p t - x.w t)) (ρ t) (by ring)))
  rw [sum_lin2, pr.1, pr.2] at h1
  exact le_cert (sub_nonneg h1) (by ring)

/-- A moment bound on a signed mean: `(Σ (p-w) f)² ≤ Σ w (a/Z - 1)² · (Σ w f² - (Σ w f)²)`. -/
theorem Sound.moment_shift (f : ι → α) :
    sum (fun t => (x.p t - x.w t) * f t) x.l * sum (fun t => (x.p t - x.w t) * f t) x.l
      ≤ x.mean (fun t => (x.a t * x.u - 1) * (x.a t * x.u - 1)) * (x.mean (fun t => f t * f t) - x.mean f * x.mean f) := by
  have e0 : x.mean (fun t => x.a t * x.u - 1) = 0 :=
    (x.mean_congr (g := fun t => x.u * x.a t + 0 * x.a t + -1) (fun t => by ring)).trans ((h.mean_lin2 x.u 0 (-1) x.a x.a).trans (by
      show x.u * x.Z + 0 * x.Z + -1 = 0
      exact eq_lin h.Zu 1 (by ring)))
  have e1 : sum (fun t => (x.p t - x.w t) * f t) x.l = x.mean (fun t => (x.a t * x.u - 1) * (f t - x.mean f)) := by
    have e2 : x.mean (fun t => (x.a t * x.u - 1) * (f t - x.mean f)) = 1 * x.mean (fun t => (x.a t * x.u - 1) * f t) + -(x.mean f) * x.mean (fun t => x.a t * x.u - 1) :=
      (x.mean_congr (fun t => by ring)).trans (x.mean_lin 1 (-(x.mean f)) (fun t => (x.a t * x.u - 1) * f t) (fun t => x.a t * x.u - 1))
    rw [e2, e0]
    refine Eq.trans (sum_congr x.l (fun t => ?_)) (show x.mean (fun t => (x.a t * x.u - 1) * f t) = _ from by ring)
    rw [x.p_eq]; ring
  have cs := cauchy_schwarz_w h.w_nonneg (fun t => x.a t * x.u - 1) (fun t => f t - x.mean f) x.l
  have e3 : x.mean (fun t => (f t - x.mean f) * (f t - x.mean f)) = x.mean (fun t => f t * f t) - x.mean f * x.mean f :=
    (x.mean_congr (g := fun t => 1 * (f t * f t) + -(2 * x.mean f) * f t + x.mean f * x.mean f) (fun t => by ring)).trans
      ((h.mean_lin2 1 (-(2 * x.mean f)) (x.mean f * x.mean f) (fun t => f t * f t) f).trans (by ring))
  rw [e1]
  refine le_trans cs (le_of_eq ?_)
  show x.mean (fun t => (x.a t * x.u - 1) * (x.a t * x.u - 1)) * x.mean (fun t => (f t - x.mean f) * (f t - x.mean f)) = _
  rw [e3]

/-- **Output bound, covariance form, with both of its roots.**
`‖o - õ‖ ≤ √Q·min(A, 1/√(1 - Q))·(√(Σ w‖ṽ‖² - ‖õ‖²) + √(Σ w ρ² - (Σ w ρ)²)) + Σ w ρ`; `g`, `σ`, `τ` stand for the three roots.

Code: `witcert_core.meter.output.output_bound`.
`python: norm_sq(output_error) <= (sqrt_up(head.cell.spread_sq) * (sqrt_up(cov_v) + sqrt_up(cov_rho)) + dot(head.cell.w, rho)) ** 2 and norm_sq(output_error) <= code_output ** 2` -/
theorem Sound.output_cov (k : List κ) (vt ve : ι → κ → α) (ρ : ι → α) (g σ τ : α) (hg : 0 ≤ g) (hσ : 0 ≤ σ) (hτ : 0 ≤ τ)
    (hρ : ∀ t, NormLe k (fun j => ve t j - vt t j) (ρ t)) (hg2 : x.A * x.A * x.Q ≤ g * g ∨ (x.Q < 1 ∧ x.Q ≤ (1 - x.Q) * (g * g)))
    (hσ2 : x.mean (fun t => dot k (vt t) (vt t)) - dot k (fun j => x.mean (fun t => vt t j)) (fun j => x.mean (fun t => vt t j)) ≤ σ * σ)
    (hτ2 : x.mean (fun t => ρ t * ρ t) - x.mean ρ * x.mean ρ ≤ τ * τ) :
    NormLe k (fun j => sum (fun t => x.p t * ve t j) x.l - sum (fun t => x.w t * vt t j) x.l)
      (g * (σ + τ) + sum (fun t => x.w t * ρ t) x.l) := by
  have hG : 0 ≤ x.mean (fun t => (x.a t * x.u - 1) * (x.a t * x.u - 1)) := h.mean_nonneg (fun t => sq_nonneg _)
  have hg2 : x.mean (fun t => (x.a t * x.u - 1) * (x.a t * x.u - 1)) ≤ g * g := by
    cases hg2 with
    | inl k => exact le_trans h.moment_le k
    | inr k => exact le_of_mul_le (pos_of_sub k.1) (le_trans h.moment_le_left k.2)
  have hX : NormLe k (fun j => sum (fun t => (x.p t - x.w t) * vt t j) x.l) (g * σ) := by
    refine ⟨nonneg_mul hg hσ, ?_⟩
    have h1 : dot k (fun j => sum (fun t => (x.p t - x.w t) * vt t j) x.l) (fun j => sum (fun t => (x.p t - x.w t) * vt t j) x.l)
        ≤ sum (fun j => x.mean (fun t => (x.a t * x.u - 1) * (x.a t * x.u - 1)) * (x.mean (fun t => vt t j * vt t j) - x.mean (fun t => vt t j) * x.mean (fun t => vt t j))) k :=
      sum_le k (fun j => h.moment_shift (fun t => vt t j))
    have e1 : sum (fun j => x.mean (fun t => vt t j * vt t j)) k = x.mean (fun t => dot k (vt t) (vt t)) := by
      show sum (fun j => sum (fun t => x.w t * (vt t j * vt t j)) x.l) k = sum (fun t => x.w t * dot k (vt t) (vt t)) x.l
      rw [← sum_comm]
      exact sum_congr x.l (fun t => sum_mul (x.w t) (fun j => vt t j * vt t j) k)
    rw [sum_mul, sum_sub, e1] at h1
    have v0 : 0 ≤ x.mean (fun t => dot k (vt t) (vt t)) - sum (fun j => x.mean (fun t => vt t j) * x.mean (fun t => vt t j)) k := by
      rw [← e1, ← sum_sub]
      exact sum_nonneg k (fun j => sub_nonneg (h.mean_sq_le (fun t => vt t j)))
    refine le_trans h1 (le_trans (mul_le_mul hG (le_trans v0 hσ2) (le_refl _) hσ2) (le_trans (mul_le_mul_right (nonneg_mul hσ hσ) hg2) (le_of_eq (by ring))))
  refine (output_split k vt ve hX (h.value_part k vt ve ρ hρ)).round_up ?_
  have m := h.moment_shift ρ
  have h2 : sum (fun t => (x.p t - x.w t) * ρ t) x.l ≤ g * τ := by
    refine le_of_sq_le (nonneg_mul hg hτ) (le_trans m ?_)
    have v0 := sub_nonneg (h.mean_sq_le ρ)
    exact le_trans (mul_le_mul hG (le_trans v0 hτ2) (le_refl _) hτ2) (le_trans (mul_le_mul_right (nonneg_mul hτ hτ) hg2) (le_of_eq (by ring)))
  exact le_cert (sub_nonneg h2) (by ring)
end Cell
end WitCert
