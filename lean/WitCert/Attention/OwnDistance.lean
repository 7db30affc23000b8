import WitCert.Attention.Output
/-!
# The output bound from each token's own distance

A diameter charges every moved weight for the farthest value. Since `Σ w (ṽ - õ) = 0`,
`Σ (p - w) ṽ = (1/Z) Σ w (a - 1)(ṽ - õ)`, so a token is charged for its own radius and its own distance only:
`‖Σ (p - w) ṽ‖ ≤ A Σ w (e^c - 1) ‖ṽ - õ‖`. Around another centre `m` the price is `η ‖m - õ‖` more.
-/
set_option synthInstance.maxSize 4000
universe u v w
namespace WitCert.Cell
variable {α : Type u} [OrderedField α] {ι : Type v} {κ : Type w} {x : Cell α ι} (h : x.Sound)
include h

/-- `|a - 1| ≤ e^c - 1`. -/
theorem Sound.ratio_near (t : ι) : abs (x.a t - 1) ≤ x.r t - 1 :=
  abs_le (le_cert (sub_nonneg (h.upper t)) (by ring)) (le_cert (sub_nonneg (two_le (h.r_pos t) (h.lower t))) (by ring))
/-- `|1/Z - 1| ≤ η`. -/
theorem Sound.u_near : abs (x.u - 1) ≤ x.eta := by
  have e := h.A_eq
  refine abs_le ?_ ?_
  · exact le_cert (sub_nonneg h.u_le_A) (eq_lin e (-1) (by ring))
  · exact le_cert (sub_nonneg (two_le h.A_pos h.one_le_Au)) (eq_lin e (-1) (by ring))

/-- **Moved weight, each token at its own distance**: `‖Σ (p - w) ṽ‖ ≤ A Σ w (e^c - 1) d_t + η δ`, where `d_t ≥ ‖ṽ_t - m‖` and
`δ ≥ ‖m - õ‖`; `m = õ`, `δ = 0` is the form of the code.

Code: `witcert_core.output.output_bound`.
`python: norm_sq(mean_shift) <= (head.cell.A * head.cell.mean([(r - 1) * d for r, d in zip(head.cell.r, distances(centre))]) + head.cell.eta * sqrt_up(norm_sq(sub(centre, average(head.cell.w, values))))) ** 2` -/
theorem Sound.own_shift (k : List κ) (v : ι → κ → α) (m : κ → α) (d : ι → α) {δ : α}
    (hd : ∀ t, NormLe k (fun j => v t j - m j) (d t)) (hδ : NormLe k (fun j => m j - x.mean (fun t => v t j)) δ) :
    NormLe k (fun j => sum (fun t => (x.p t - x.w t) * v t j) x.l) (x.A * x.mean (fun t => (x.r t - 1) * d t) + x.eta * δ) := by
  have n1 : NormLe k (fun j => sum (fun t => x.u * (x.w t * (x.a t - 1)) * (v t j - m j)) x.l)
      (sum (fun t => abs (x.u * (x.w t * (x.a t - 1))) * d t) x.l) := NormLe.sum x.l (fun t => (hd t).smul _)
  have b1 : sum (fun t => abs (x.u * (x.w t * (x.a t - 1))) * d t) x.l ≤ x.A * x.mean (fun t => (x.r t - 1) * d t) := by
    show _ ≤ x.A * sum (fun t => x.w t * ((x.r t - 1) * d t)) x.l
    rw [← sum_mul]
    refine sum_le x.l (fun t => ?_)
    rw [abs_mul_nonneg h.u_nonneg, abs_mul_nonneg (h.w_nonneg t)]
    have hr := sub_nonneg (h.one_le_r t)
    have q : x.u * (x.w t * abs (x.a t - 1)) ≤ x.A * (x.w t * (x.r t - 1)) :=
      mul_le_mul h.u_nonneg (nonneg_mul (h.w_nonneg t) hr) h.u_le_A (mul_le_mul_left (h.w_nonneg t) (h.ratio_near t))
    exact le_trans (mul_le_mul_right (hd t).1 q) (le_of_eq (by ring))
  have n2 := (hδ.smul (1 - x.u)).round_up (mul_le_mul_right hδ.1
    (le_trans (le_of_eq ((abs_neg (1 - x.u)).symm.trans (congrArg abs (by ring)))) h.u_near))
  refine ((n1.round_up b1).add n2).congr (fun j => ?_)
  have e1 : sum (fun t => x.u * (x.w t * (x.a t - 1)) * (v t j - m j)) x.l
      = x.u * x.mean (fun t => x.a t * v t j) + -x.u * x.mean (fun t => v t j) + (-(x.u * m j) * x.Z + x.u * m j) := by
    have e2 : sum (fun t => x.u * (x.w t * (x.a t - 1)) * (v t j - m j)) x.l
        = x.mean (fun t => 1 * (x.u * (x.a t * v t j) + -x.u * v t j) + -(x.u * m j) * x.a t + x.u * m j) :=
      sum_congr x.l (fun t => by ring)
    rw [e2, h.mean_lin2, mean_lin]
    show 1 * _ + -(x.u * m j) * x.Z + x.u * m j = _
    ring
  have e3 : sum (fun t => (x.p t - x.w t) * v t j) x.l = x.u * x.mean (fun t => x.a t * v t j) - x.mean (fun t => v t j) := by
    rw [← mean_mul]
    show _ = sum (fun t => x.w t * (x.u * (x.a t * v t j))) x.l - sum (fun t => x.w t * v t j) x.l
    rw [← sum_sub]
    exact sum_congr x.l (fun t => by rw [x.p_eq]; ring)
  rw [e1, e3]
  exact eq_lin h.Zu (m j) (by ring)

/-- The same for one number a token. -/
theorem Sound.own_shift_one (f e : ι → α) (b : α) {β : α} (he : ∀ t, abs (f t - b) ≤ e t) (hβ : abs (b - x.mean f) ≤ β) :
    sum (fun t => (x.p t - x.w t) * f t) x.l ≤ x.A * x.mean (fun t => (x.r t - 1) * e t) + x.eta * β := by
  have one : ∀ {y ρ : α}, abs y ≤ ρ → NormLe [()] (fun _ => y) ρ := fun {y ρ} hy => by
    have h0 := le_trans (abs_nonneg y) hy
    refine ⟨h0, ?_⟩
    show y * y + 0 ≤ ρ * ρ
    rw [show y * y + 0 = y * y from by ring, ← abs_mul_self]
    exact mul_le_mul (abs_nonneg y) h0 hy hy
  have n := h.own_shift [()] (fun t _ => f t) (fun _ => b) e (fun t => one (he t)) (one hβ)
  refine le_of_sq_le n.1 (le_trans (le_of_eq ?_) n.2)
  show _ = sum (fun t => (x.p t - x.w t) * f t) x.l * sum (fun t => (x.p t - x.w t) * f t) x.l + 0
  ring

/-- **Output bound, each token at its own distance.**
`‖o - õ‖ ≤ A Σ w (e^c - 1)(d_t + e_t) + η (δ + β) + Σ w ρ`: `d_t ≥ ‖ṽ_t - m‖` and `e_t ≥ |ρ_t - b|` are distances from any centres,
`δ ≥ ‖m - õ‖` and `β ≥ |b - Σ w ρ|` what these miss; both 0 around `õ` and `Σ w ρ` themselves.

Code: `witcert_core.output.output_bound`.
`python: norm_sq(output_error) <= (head.cell.A * head.cell.mean([(r - 1) * (d + abs(x - head.cell.mean(rho))) for r, d, x in zip(head.cell.r, distances(average(head.cell.w, values)), rho)]) + head.cell.mean(rho)) ** 2` -/
theorem Sound.output_own (k : List κ) (vt ve : ι → κ → α) (ρ : ι → α) (m : κ → α) (b : α) (d e : ι → α) {δ β : α}
    (hρ : ∀ t, NormLe k (fun j => ve t j - vt t j) (ρ t)) (hd : ∀ t, NormLe k (fun j => vt t j - m j) (d t))
    (he : ∀ t, abs (ρ t - b) ≤ e t) (hδ : NormLe k (fun j => m j - x.mean (fun t => vt t j)) δ) (hβ : abs (b - x.mean ρ) ≤ β) :
    NormLe k (fun j => sum (fun t => x.p t * ve t j) x.l - sum (fun t => x.w t * vt t j) x.l)
      (x.A * x.mean (fun t => (x.r t - 1) * (d t + e t)) + x.eta * (δ + β) + sum (fun t => x.w t * ρ t) x.l) := by
  refine (output_split k vt ve (h.own_shift k vt m d hd hδ) (h.value_part k vt ve ρ hρ)).round_up ?_
  have n := h.own_shift_one ρ e b he hβ
  have s : x.mean (fun t => (x.r t - 1) * (d t + e t)) = x.mean (fun t => (x.r t - 1) * d t) + x.mean (fun t => (x.r t - 1) * e t) :=
    (x.mean_congr (fun t => by ring)).trans (x.mean_add _ _)
  rw [s]
  exact le_cert (sub_nonneg n) (by ring)

/-- `(A Σ w (e^c - 1) d)² ≤ A²Q Σ w d²`. -/
theorem Sound.own_sq_le (d : ι → α) :
    x.A * x.mean (fun t => (x.r t - 1) * d t) * (x.A * x.mean (fun t => (x.r t - 1) * d t)) ≤ x.A * x.A * x.Q * x.mean (fun t => d t * d t) := by
  have cs : x.mean (fun t => (x.r t - 1) * d t) * x.mean (fun t => (x.r t - 1) * d t) ≤ x.Q * x.mean (fun t => d t * d t) :=
    cauchy_schwarz_w h.w_nonneg (fun t => x.r t - 1) d x.l
  exact le_cert (nonneg_mul (nonneg_mul (le_of_lt h.A_pos) (le_of_lt h.A_pos)) (sub_nonneg cs)) (by ring)
/-- **The own-distance form is never above the covariance form**: with the distances from `õ` and from `Σ w ρ` themselves,
`A Σ w (e^c - 1)(d + e) ≤ A√Q·(√(Σ w‖ṽ‖² - ‖õ‖²) + √(Σ w ρ² - (Σ w ρ)²))`; `g`, `σ`, `τ` stand for the three roots.

Code: `witcert_core.output.output_bound`.
`python: head.cell.A * head.cell.mean([(r - 1) * (d + abs(x - head.cell.mean(rho))) for r, d, x in zip(head.cell.r, distances(average(head.cell.w, values)), rho)]) <= sqrt_up(head.cell.rms_sq) * (sqrt_up(cov_v) + sqrt_up(cov_rho)) + tiny` -/
theorem Sound.own_le_cov (k : List κ) (vt : ι → κ → α) (ρ d e : ι → α) (g σ τ : α) (hg : 0 ≤ g) (hσ : 0 ≤ σ) (hτ : 0 ≤ τ)
    (hd : ∀ t, d t * d t = dot k (fun j => vt t j - x.mean (fun s => vt s j)) (fun j => vt t j - x.mean (fun s => vt s j)))
    (he : ∀ t, e t * e t = (ρ t - x.mean ρ) * (ρ t - x.mean ρ)) (hg2 : x.A * x.A * x.Q ≤ g * g)
    (hσ2 : x.mean (fun t => dot k (vt t) (vt t)) - dot k (fun j => x.mean (fun t => vt t j)) (fun j => x.mean (fun t => vt t j)) ≤ σ * σ)
    (hτ2 : x.mean (fun t => ρ t * ρ t) - x.mean ρ * x.mean ρ ≤ τ * τ) :
    x.A * x.mean (fun t => (x.r t - 1) * (d t + e t)) ≤ g * (σ + τ) := by
  have hG : 0 ≤ x.A * x.A * x.Q := nonneg_mul (nonneg_mul (le_of_lt h.A_pos) (le_of_lt h.A_pos)) h.Q_nonneg
  have var : ∀ f : ι → α, x.mean (fun t => (f t - x.mean f) * (f t - x.mean f)) = x.mean (fun t => f t * f t) - x.mean f * x.mean f := fun f =>
    (x.mean_congr (g := fun t => 1 * (f t * f t) + -(2 * x.mean f) * f t + x.mean f * x.mean f) (fun t => by ring)).trans
      ((h.mean_lin2 1 (-(2 * x.mean f)) (x.mean f * x.mean f) (fun t => f t * f t) f).trans (by ring))
  have one : ∀ (f : ι → α) (s : α), 0 ≤ s → x.mean (fun t => f t * f t) ≤ s * s → x.A * x.mean (fun t => (x.r t - 1) * f t) ≤ g * s := fun f s hs hf =>
    le_of_sq_le (nonneg_mul hg hs) (le_trans (h.own_sq_le f) (le_trans
      (mul_le_mul hG (nonneg_mul hs hs) (le_refl _) hf)
      (le_trans (mul_le_mul_right (nonneg_mul hs hs) hg2) (le_of_eq (by ring)))))
  have ed : x.mean (fun t => d t * d t) = x.mean (fun t => dot k (vt t) (vt t)) - dot k (fun j => x.mean (fun t => vt t j)) (fun j => x.mean (fun t => vt t j)) := by
    have swap : ∀ f : ι → κ → α, x.mean (fun t => sum (fun j => f t j) k) = sum (fun j => x.mean (fun t => f t j)) k := fun f => by
      show sum (fun t => x.w t * sum (fun j => f t j) k) x.l = sum (fun j => sum (fun t => x.w t * f t j) x.l) k
      rw [← sum_comm]
      exact sum_congr x.l (fun t => (sum_mul (x.w t) (fun j => f t j) k).symm)
    rw [x.mean_congr hd]
    show x.mean (fun t => sum (fun j => (vt t j - x.mean (fun s => vt s j)) * (vt t j - x.mean (fun s => vt s j))) k)
      = x.mean (fun t => sum (fun j => vt t j * vt t j) k) - sum (fun j => x.mean (fun t => vt t j) * x.mean (fun t => vt t j)) k
    rw [swap, swap, ← sum_sub]
    exact sum_congr k (fun j => var (fun t => vt t j))
  have s : x.mean (fun t => (x.r t - 1) * (d t + e t)) = x.mean (fun t => (x.r t - 1) * d t) + x.mean (fun t => (x.r t - 1) * e t) :=
    (x.mean_congr (fun t => by ring)).trans (x.mean_add _ _)
  rw [s]
  exact le_trans (le_of_eq (mul_add _ _ _)) (le_trans (add_le_add
    (one d σ hσ (le_trans (le_of_eq ed) hσ2))
    (one e τ hτ (le_trans (le_of_eq ((x.mean_congr he).trans (var ρ))) hτ2))) (le_of_eq (by ring)))
end WitCert.Cell
