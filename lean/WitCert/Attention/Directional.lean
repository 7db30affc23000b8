import WitCert.Attention.Output
/-!
# The output bound that knows where each value lies

A diameter charges every moved weight for the farthest value, a variance assumes that all values lie on one line. Moved weight is
taken from where the weights are (`output_place`); and each token can be taken with its own distance and direction from `õ`
(`output_directional`): for a unit vector `u` put `x_t = ⟨u, ṽ_t - õ⟩ + ρ_t - Σ w ρ`; what exact attention gains along `u` is the `f` with
`Σ w a (x - f) = 0`, and `f ≤ λ` follows from `Σ w a (x - λ) ≤ 0`, where `(a - 1) y ≤ s |y| + h y` with `s = sinh c`, `h = cosh c - 1`.
-/
set_option synthInstance.maxSize 4000
universe u v w
namespace WitCert
variable {α : Type u} [OrderedField α] {ι : Type v} {κ : Type w}

theorem dot_add (k : List κ) (u v w : κ → α) : dot k u (fun j => v j + w j) = dot k u v + dot k u w :=
  (sum_congr k (fun j => by ring)).trans (sum_add (fun j => u j * v j) (fun j => u j * w j) k)
theorem dot_sum (k : List κ) (u : κ → α) (c : ι → α) (v : ι → κ → α) (l : List ι) :
    dot k u (fun j => sum (fun t => c t * v t j) l) = sum (fun t => c t * dot k u (v t)) l := by
  show sum (fun j => u j * sum (fun t => c t * v t j) l) k = _
  rw [sum_congr k (g := fun j => sum (fun t => c t * (u j * v t j)) l) (fun j => by
    rw [← sum_mul]; exact sum_congr l (fun t => by ring)), ← sum_comm]
  exact sum_congr l (fun t => sum_mul (c t) (fun j => u j * v t j) k)
/-- Along a unit vector no vector is longer than its norm. -/
theorem dot_unit {k : List κ} {u v : κ → α} {n : α} (hu : NormLe k u 1) (hv : NormLe k v n) : abs (dot k u v) ≤ n :=
  le_trans (abs_dot_le k u v hu hv) (le_of_eq (by ring))
/-- Minkowski: `Σ W (x + y)² ≤ (m + n)²`. -/
theorem minkowski {W x y : ι → α} (hW : ∀ t, 0 ≤ W t) {m n : α} (hm : 0 ≤ m) (hn : 0 ≤ n) (l : List ι)
    (hx : sum (fun t => W t * (x t * x t)) l ≤ m * m) (hy : sum (fun t => W t * (y t * y t)) l ≤ n * n) :
    sum (fun t => W t * ((x t + y t) * (x t + y t))) l ≤ (m + n) * (m + n) := by
  have cs := cauchy_schwarz_w hW x y l
  have x0 := sum_nonneg l (fun t => nonneg_mul (hW t) (sq_nonneg (x t)))
  have y0 := sum_nonneg l (fun t => nonneg_mul (hW t) (sq_nonneg (y t)))
  have c : sum (fun t => W t * (x t * y t)) l ≤ m * n := le_of_sq_le (nonneg_mul hm hn)
    (le_trans cs (le_trans (mul_le_mul x0 (nonneg_mul hn hn) hx hy) (le_of_eq (by ring))))
  rw [sum_congr l (g := fun t => 1 * (W t * (x t * x t)) + 2 * (W t * (x t * y t)) + 1 * (W t * (y t * y t))) (fun t => by ring), sum_lin3]
  exact le_cert (add_nonneg (add_nonneg (sub_nonneg hx) (sub_nonneg hy)) (nonneg_mul zero_le_two (sub_nonneg c))) (by ring)

/-! ### The largest eigenvalue -/

/-- `M v` over the coordinates `k`. -/
def apply (k : List κ) (M : κ → κ → α) (v : κ → α) : κ → α := fun i => dot k (M i) v
/-- `M N`. -/
def compose (k : List κ) (M N : κ → κ → α) : κ → κ → α := fun i j => sum (fun m => M i m * N m j) k
theorem apply_compose (k : List κ) (M N : κ → κ → α) (v : κ → α) (i : κ) : apply k (compose k M N) v i = apply k M (apply k N v) i := by
  show sum (fun j => sum (fun m => M i m * N m j) k * v j) k = sum (fun m => M i m * sum (fun j => N m j * v j) k) k
  rw [sum_congr k (f := fun j => sum (fun m => M i m * N m j) k * v j) (g := fun j => sum (fun m => M i m * (N m j * v j)) k) (fun j => by
    rw [mul_comm, ← sum_mul]; exact sum_congr k (fun m => by ring)), ← sum_comm]
  exact sum_congr k (fun m => sum_mul (M i m) (fun j => N m j * v j) k)
theorem dot_apply (k : List κ) {M : κ → κ → α} (hM : ∀ i j, M i j = M j i) (u v : κ → α) : dot k u (apply k M v) = dot k (apply k M u) v := by
  show sum (fun i => u i * sum (fun j => M i j * v j) k) k = sum (fun j => sum (fun i => M j i * u i) k * v j) k
  rw [sum_congr k (f := fun i => u i * sum (fun j => M i j * v j) k) (g := fun i => sum (fun j => u i * (M i j * v j)) k) (fun i =>
    (sum_mul (u i) (fun j => M i j * v j) k).symm), sum_comm]
  refine sum_congr k (fun j => ?_)
  rw [mul_comm, ← sum_mul]
  exact sum_congr k (fun i => by rw [hM i j]; ring)
/-- `⟨u, M u⟩² ≤ ⟨u, M² u⟩` for a unit vector. -/
theorem square_step (k : List κ) {M : κ → κ → α} (hM : ∀ i j, M i j = M j i) {u : κ → α} (hu : NormLe k u 1) :
    dot k u (apply k M u) * dot k u (apply k M u) ≤ dot k u (apply k (compose k M M) u) := by
  have e : dot k u (apply k (compose k M M) u) = dot k (apply k M u) (apply k M u) := by
    rw [show apply k (compose k M M) u = apply k M (apply k M u) from funext (apply_compose k M M u)]
    exact dot_apply k hM u (apply k M u)
  have n0 : 0 ≤ dot k (apply k M u) (apply k M u) := sum_nonneg k (fun j => sq_nonneg _)
  rw [e]
  exact le_trans (cauchy_schwarz u (apply k M u) k) (le_trans (mul_le_mul_right n0 hu.2) (le_of_eq (by
    show 1 * 1 * dot k (apply k M u) (apply k M u) = _
    ring)))
/-- `⟨u, M u⟩ ≤ ‖M‖_F` for a unit vector. -/
theorem frobenius (k : List κ) (M : κ → κ → α) {u : κ → α} (hu : NormLe k u 1) {f : α} (hf : 0 ≤ f)
    (hM : sum (fun i => dot k (M i) (M i)) k ≤ f * f) : dot k u (apply k M u) ≤ f := by
  have row : ∀ i, apply k M u i * apply k M u i ≤ dot k (M i) (M i) := fun i =>
    le_trans (cauchy_schwarz (M i) u k) (le_trans (mul_le_mul_left (sum_nonneg k (fun j => sq_nonneg _)) hu.2) (le_of_eq (by
      show dot k (M i) (M i) * (1 * 1) = _
      ring)))
  have n : NormLe k (apply k M u) f := ⟨hf, le_trans (sum_le k row) hM⟩
  exact le_trans (le_abs _) (dot_unit hu n)

/-- **The largest eigenvalue from a trace.** For a symmetric `M`, `‖M⁴‖_F ≤ f` (its square is `tr M⁸`) and `f ≤ L⁴`, no unit vector has
`⟨u, M u⟩ > L`.

Code: `witcert_core.meter.directional.spectral`.
`python: all(quadratic(u) <= spectral_bound for u in unit_vectors)` -/
theorem spectral_le (k : List κ) {M : κ → κ → α} (hM : ∀ i j, M i j = M j i) {f L : α} (hf : 0 ≤ f) (hL : 0 ≤ L)
    (hF : sum (fun i => dot k (compose k (compose k M M) (compose k M M) i) (compose k (compose k M M) (compose k M M) i)) k ≤ f * f)
    (hfL : f ≤ L * L * (L * L)) {u : κ → α} (hu : NormLe k u 1) : dot k u (apply k M u) ≤ L := by
  have sym : ∀ i j, compose k M M i j = compose k M M j i := fun i j => sum_congr k (fun m => by rw [hM i m, hM m j]; exact mul_comm _ _)
  have s1 := square_step k hM hu
  have s2 := square_step k sym hu
  have s3 := frobenius k (compose k (compose k M M) (compose k M M)) hu hf hF
  have q2 : 0 ≤ dot k u (apply k (compose k M M) u) := le_trans (sq_nonneg _) s1
  refine le_of_sq_le hL (le_trans s1 (le_of_sq_le (nonneg_mul hL hL) ?_))
  exact le_trans s2 (le_trans s3 hfL)

namespace Cell
variable {x : Cell α ι} (h : x.Sound)
include h

/-- **Output bound, from where weight moves.** No value is further than `R` from a centre `m`, and `E ≥ Σ w ‖ṽ - m‖²`; weight that
moves away lies where the weights are: `‖o - õ‖ ≤ TV·(R + max ρ - min ρ) + √(TV·E) + Σ w ρ`; `g` stands for the root.

Code: `witcert_core.meter.output.output_bound`.
`python: norm_sq(output_error) <= (head.cell.TV * (max(distances(centre)) + max(rho) - min(rho)) + sqrt_up(head.cell.TV * head.cell.mean([d * d for d in distances(centre)])) + dot(head.cell.w, rho)) ** 2` -/
theorem Sound.output_place (k : List κ) (vt ve : ι → κ → α) (ρ d : ι → α) (m : κ → α) {R E g ρmax ρmin : α} (hg : 0 ≤ g)
    (hd : ∀ t, NormLe k (fun j => vt t j - m j) (d t)) (hR : ∀ t, d t ≤ R) (hE : x.mean (fun t => d t * d t) ≤ E) (hg2 : x.TV * E ≤ g * g)
    (hρ : ∀ t, NormLe k (fun j => ve t j - vt t j) (ρ t)) (hmax : ∀ t, ρ t ≤ ρmax) (hmin : ∀ t, ρmin ≤ ρ t) :
    NormLe k (fun j => sum (fun t => x.p t * ve t j) x.l - sum (fun t => x.w t * vt t j) x.l)
      (x.TV * (R + (ρmax - ρmin)) + g + sum (fun t => x.w t * ρ t) x.l) := by
  have pr : _ = x.TV ∧ _ = x.TV := tv_parts (h.p_sum.trans h.w_sum.symm)
  have e0 : sum (fun t => x.p t - x.w t) x.l = 0 := by
    rw [sum_sub, h.p_sum, h.w_sum]; ring
  -- what leaves is at most w
  have le_w : ∀ t, (abs (x.p t - x.w t) - (x.p t - x.w t)) / 2 ≤ x.w t := fun t => by
    refine div_le zero_lt_two ?_
    cases abs_cases (x.p t - x.w t) with
    | inl a => rw [a.2]; exact le_cert (nonneg_mul (h.w_nonneg t) zero_le_two) (by ring)
    | inr a => rw [a.2]; exact le_cert (nonneg_mul zero_le_two (h.p_nonneg t)) (by ring)
  have n1 : NormLe k (fun j => sum (fun t => (x.p t - x.w t) * (vt t j - m j)) x.l) (sum (fun t => abs (x.p t - x.w t) * d t) x.l) :=
    NormLe.sum x.l (fun t => (hd t).smul (x.p t - x.w t))
  have arrive : sum (fun t => (abs (x.p t - x.w t) + (x.p t - x.w t)) / 2 * d t) x.l ≤ x.TV * R := by
    refine le_trans (sum_le x.l (fun t => mul_le_mul_left (parts_nonneg (x.p t - x.w t)).1 (hR t))) (le_of_eq ?_)
    rw [sum_congr x.l (g := fun t => R * ((abs (x.p t - x.w t) + (x.p t - x.w t)) / 2)) (fun t => by ring), sum_mul, pr.1]
    ring
  have leave : sum (fun t => (abs (x.p t - x.w t) - (x.p t - x.w t)) / 2 * d t) x.l ≤ g := by
    have cs := cauchy_schwarz_w (fun t => (parts_nonneg (x.p t - x.w t)).2) (fun _ => 1) d x.l
    rw [sum_congr x.l (f := fun t => (abs (x.p t - x.w t) - (x.p t - x.w t)) / 2 * (1 * d t))
        (g := fun t => (abs (x.p t - x.w t) - (x.p t - x.w t)) / 2 * d t) (fun t => by ring),
      sum_congr x.l (f := fun t => (abs (x.p t - x.w t) - (x.p t - x.w t)) / 2 * (1 * 1))
        (g := fun t => (abs (x.p t - x.w t) - (x.p t - x.w t)) / 2) (fun t => by ring), pr.2] at cs
    have sq : sum (fun t => (abs (x.p t - x.w t) - (x.p t - x.w t)) / 2 * (d t * d t)) x.l ≤ E :=
      le_trans (sum_le x.l (fun t => mul_le_mul_right (sq_nonneg (d t)) (le_w t))) hE
    exact le_of_sq_le hg (le_trans cs (le_trans (mul_le_mul_left h.TV_nonneg sq) hg2))
  have both : sum (fun t => abs (x.p t - x.w t) * d t) x.l ≤ x.TV * R + g := by
    have e : sum (fun t => abs (x.p t - x.w t) * d t) x.l = sum (fun t => (abs (x.p t - x.w t) + (x.p t - x.w t)) / 2 * d t) x.l
        + sum (fun t => (abs (x.p t - x.w t) - (x.p t - x.w t)) / 2 * d t) x.l := by
      rw [← sum_add]
      exact sum_congr x.l (fun t => eq_lin two_half (-(abs (x.p t - x.w t) * d t)) (by ring))
    rw [e]
    exact add_le_add arrive leave
  have n2 : NormLe k (fun j => sum (fun t => (x.p t - x.w t) * vt t j) x.l) (x.TV * R + g) :=
    (n1.round_up both).congr (fun j => by
      rw [sum_congr x.l (f := fun t => (x.p t - x.w t) * (vt t j - m j)) (g := fun t => 1 * ((x.p t - x.w t) * vt t j) + -(m j) * (x.p t - x.w t))
        (fun t => by ring), sum_lin2, e0]
      ring)
  refine (output_split k vt ve n2 (h.value_part k vt ve ρ hρ)).round_up ?_
  have h1 : sum (fun t => (x.p t - x.w t) * ρ t) x.l ≤ sum (fun t => ρmax * ((abs (x.p t - x.w t) + (x.p t - x.w t)) / 2) + -ρmin * ((abs (x.p t - x.w t) - (x.p t - x.w t)) / 2)) x.l :=
    sum_le x.l (fun t => le_cert (add_nonneg (nonneg_mul (parts_nonneg (x.p t - x.w t)).1 (sub_nonneg (hmax t))) (nonneg_mul (parts_nonneg (x.p t - x.w t)).2 (sub_nonneg (hmin t))))
      (eq_lin (parts_split (x.p t - x.w t)) (ρ t) (by ring)))
  rw [sum_lin2, pr.1, pr.2] at h1
  exact le_cert (sub_nonneg h1) (by ring)

/-- `(a - 1) y ≤ s |y| + h y` with `s = (r - 1/r)/2 = sinh c` and `h = (r + 1/r)/2 - 1 = cosh c - 1`. -/
theorem Sound.ratio_line (t : ι) (y : α) :
    (x.a t - 1) * y ≤ 2⁻¹ * (x.r t - (x.r t)⁻¹) * abs y + (2⁻¹ * (x.r t + (x.r t)⁻¹) - 1) * y := by
  cases abs_cases y with
  | inl k =>
    rw [k.2]
    exact le_cert (nonneg_mul k.1 (sub_nonneg (h.upper t))) (eq_lin two_half (x.r t * y) (by ring))
  | inr k =>
    rw [k.2]
    exact le_cert (nonneg_mul (sub_nonneg k.1) (sub_nonneg (h.inv_r_le_a t))) (eq_lin two_half ((x.r t)⁻¹ * y) (by ring))

/-- **Output bound that knows directions.** With `d = ṽ - õ`, `r = ρ - Σ w ρ`, `s = sinh c`, `h = cosh c - 1` and any weights `b > 0`: let
`K₀ = Σ w s b`, `K₂ = Σ w s/b`, `σ₁ ≥ ‖Σ w (s/b) d‖`, `σ₂ ≥ |Σ w (s/b) r|`, `H₁ ≥ ‖Σ w h d‖`, `H₂ ≥ |Σ w h r|`, `l₁²` at least `Σ w (s/b)⟨u, d⟩²` for every
unit vector, `l₂² ≥ Σ w (s/b) r²`. If `√(K₀((l₁ + l₂)² + 2λ(σ₁ + σ₂) + λ²K₂)) + H₁ + H₂ ≤ λ(1 + Σ w h)` then `o - õ` reaches at most
`λ + Σ w ρ` along any unit vector; `g` stands for the root.

Code: `witcert_core.meter.directional.moved`.
`python: norm_sq(output_error) <= (directional_moved + dot(head.cell.w, rho)) ** 2` -/
theorem Sound.output_directional (k : List κ) (vt ve : ι → κ → α) (ρ b : ι → α) {l₁ l₂ σ₁ σ₂ H₁ H₂ lam g : α}
    (hρ : ∀ t, NormLe k (fun j => ve t j - vt t j) (ρ t)) (hb : ∀ t, 0 < b t) (hlam : 0 ≤ lam) (hg : 0 ≤ g) (hl1 : 0 ≤ l₁) (hl2 : 0 ≤ l₂)
    (d : ι → κ → α) (hd : ∀ t j, d t j = vt t j - x.mean (fun t => vt t j)) (r s q own : ι → α) (hr : ∀ t, r t = ρ t - x.mean ρ)
    (hs : ∀ t, s t = 2⁻¹ * (x.r t - (x.r t)⁻¹)) (hq : ∀ t, q t = 2⁻¹ * (x.r t + (x.r t)⁻¹) - 1) (hown : ∀ t, own t = x.w t * s t / b t)
    (hσ1 : NormLe k (fun j => sum (fun t => own t * d t j) x.l) σ₁) (hσ2 : abs (sum (fun t => own t * r t) x.l) ≤ σ₂)
    (hH1 : NormLe k (fun j => sum (fun t => x.w t * q t * d t j) x.l) H₁) (hH2 : abs (sum (fun t => x.w t * q t * r t) x.l) ≤ H₂)
    (hl : ∀ u, NormLe k u 1 → sum (fun t => own t * (dot k u (d t) * dot k u (d t))) x.l ≤ l₁ * l₁)
    (hlr : sum (fun t => own t * (r t * r t)) x.l ≤ l₂ * l₂)
    (hroot : sum (fun t => x.w t * s t * b t) x.l * ((l₁ + l₂) * (l₁ + l₂) + 2 * lam * (σ₁ + σ₂) + lam * lam * sum own x.l) ≤ g * g)
    (hlast : g + (H₁ + H₂) ≤ lam * (1 + x.mean q)) (u : κ → α) (hu : NormLe k u 1) :
    dot k u (fun j => sum (fun t => x.p t * ve t j) x.l - sum (fun t => x.w t * vt t j) x.l) ≤ lam + sum (fun t => x.w t * ρ t) x.l := by
  -- along u
  have hs0 : ∀ t, 0 ≤ s t := fun t => by
    rw [hs t]
    refine nonneg_mul half_nonneg ?_
    have i1 : (x.r t)⁻¹ ≤ 1 := le_of_mul_le (h.r_pos t) (by rw [mul_inv_cancel (h.r_pos t)]; exact le_trans (h.one_le_r t) (le_of_eq (by ring)))
    exact sub_nonneg (le_trans i1 (h.one_le_r t))
  have own0 : ∀ t, 0 ≤ own t := fun t => by rw [hown t]; exact div_nonneg (nonneg_mul (h.w_nonneg t) (hs0 t)) (hb t)
  have gain : dot k u (fun j => sum (fun t => x.p t * ve t j) x.l - sum (fun t => x.w t * vt t j) x.l)
      ≤ sum (fun t => x.p t * (dot k u (d t) + r t)) x.l + x.mean ρ := by
    have e : ∀ j, sum (fun t => x.p t * ve t j) x.l - sum (fun t => x.w t * vt t j) x.l
        = sum (fun t => x.p t * ((ve t j - vt t j) + d t j)) x.l := fun j => by
      rw [sum_congr x.l (f := fun t => x.p t * ((ve t j - vt t j) + d t j)) (g := fun t => 1 * (x.p t * ve t j) + -(x.mean (fun t => vt t j)) * x.p t)
        (fun t => by rw [hd t j]; ring), sum_lin2, h.p_sum]
      show _ - x.mean (fun t => vt t j) = _
      ring
    rw [show (fun j => sum (fun t => x.p t * ve t j) x.l - sum (fun t => x.w t * vt t j) x.l)
      = (fun j => sum (fun t => x.p t * ((ve t j - vt t j) + d t j)) x.l) from funext e,
      dot_sum k u x.p (fun t j => (ve t j - vt t j) + d t j) x.l]
    have le : sum (fun t => x.p t * dot k u (fun j => (ve t j - vt t j) + d t j)) x.l
        ≤ sum (fun t => 1 * (x.p t * (dot k u (d t) + r t)) + x.mean ρ * x.p t) x.l := sum_le x.l (fun t => by
      rw [dot_add]
      have c := le_trans (le_abs _) (dot_unit hu (hρ t))
      exact le_cert (nonneg_mul (h.p_nonneg t) (sub_nonneg c)) (by rw [hr t]; ring))
    rw [sum_lin2, h.p_sum] at le
    exact le_trans le (le_of_eq (by ring))
  refine le_trans gain ?_
  -- the mean along u is 0
  have mean_d : ∀ c : ι → α, sum (fun t => c t * dot k u (d t)) x.l = dot k u (fun j => sum (fun t => c t * d t j) x.l) :=
    fun c => (dot_sum k u c d x.l).symm
  have zero : x.mean (fun t => dot k u (d t) + r t) = 0 := by
    rw [mean_add]
    have z1 : x.mean (fun t => dot k u (d t)) = 0 := by
      show sum (fun t => x.w t * dot k u (d t)) x.l = 0
      rw [mean_d]
      have z : ∀ j, sum (fun t => x.w t * d t j) x.l = 0 := fun j => by
        rw [sum_congr x.l (g := fun t => 1 * (x.w t * vt t j) + -(x.mean (fun t => vt t j)) * x.w t) (fun t => by rw [hd t j]; ring), sum_lin2, h.w_sum]
        show 1 * x.mean (fun t => vt t j) + _ = _
        ring
      rw [show (fun j => sum (fun t => x.w t * d t j) x.l) = (fun _ => 0) from funext z]
      exact (sum_congr k (fun j => by ring)).trans (sum_zero k)
    have z2 : x.mean r = 0 := by
      rw [x.mean_congr (g := fun t => 1 * ρ t + 0 * ρ t + -(x.mean ρ)) (fun t => by rw [hr t]; ring), h.mean_lin2]
      ring
    rw [z1, z2]; ring
  -- what any λ has to bound
  have key : x.mean (fun t => x.a t * (dot k u (d t) + r t - lam)) ≤ 0 := by
    have split : x.mean (fun t => x.a t * (dot k u (d t) + r t - lam)) = x.mean (fun t => (x.a t - 1) * (dot k u (d t) + r t - lam)) - lam := by
      rw [x.mean_congr (g := fun t => 1 * ((x.a t - 1) * (dot k u (d t) + r t - lam)) + 1 * (dot k u (d t) + r t) + -lam) (fun t => by ring),
        h.mean_lin2, zero]
      ring
    have line : x.mean (fun t => (x.a t - 1) * (dot k u (d t) + r t - lam))
        ≤ x.mean (fun t => s t * abs (dot k u (d t) + r t - lam)) + x.mean (fun t => q t * (dot k u (d t) + r t - lam)) := by
      rw [← mean_add]
      exact h.mean_le (fun t => by rw [hs t, hq t]; exact h.ratio_line t _)
    have hpart : x.mean (fun t => q t * (dot k u (d t) + r t - lam)) ≤ H₁ + H₂ - lam * x.mean q := by
      have e : x.mean (fun t => q t * (dot k u (d t) + r t - lam))
          = dot k u (fun j => sum (fun t => x.w t * q t * d t j) x.l) + sum (fun t => x.w t * q t * r t) x.l - lam * x.mean q := by
        rw [← mean_d (fun t => x.w t * q t), ← mean_mul, ← sum_add]
        show sum (fun t => x.w t * (q t * (dot k u (d t) + r t - lam))) x.l = _ - sum (fun t => x.w t * (lam * q t)) x.l
        rw [← sum_sub]
        exact sum_congr x.l (fun t => by ring)
      rw [e]
      have b1 := le_trans (le_abs _) (dot_unit hu hH1)
      have b2 := le_trans (le_abs _) hH2
      exact le_cert (add_nonneg (sub_nonneg b1) (sub_nonneg b2)) (by ring)
    have spart : x.mean (fun t => s t * abs (dot k u (d t) + r t - lam)) ≤ g := by
      have cs := cauchy_schwarz_w own0 b (fun t => abs (dot k u (d t) + r t - lam)) x.l
      have ob : ∀ t, own t * b t = x.w t * s t := fun t => by rw [hown t]; exact div_mul_cancel (hb t)
      have c1 : sum (fun t => own t * (b t * abs (dot k u (d t) + r t - lam))) x.l = x.mean (fun t => s t * abs (dot k u (d t) + r t - lam)) :=
        sum_congr x.l (fun t => eq_lin (ob t) (abs (dot k u (d t) + r t - lam)) (by ring))
      have c2 : sum (fun t => own t * (b t * b t)) x.l = sum (fun t => x.w t * s t * b t) x.l :=
        sum_congr x.l (fun t => eq_lin (ob t) (b t) (by ring))
      have c3 : sum (fun t => own t * (abs (dot k u (d t) + r t - lam) * abs (dot k u (d t) + r t - lam))) x.l
          ≤ (l₁ + l₂) * (l₁ + l₂) + 2 * lam * (σ₁ + σ₂) + lam * lam * sum own x.l := by
        have mk := minkowski own0 hl1 hl2 x.l (hl u hu) hlr
        have e : sum (fun t => own t * (abs (dot k u (d t) + r t - lam) * abs (dot k u (d t) + r t - lam))) x.l
            = 1 * sum (fun t => own t * ((dot k u (d t) + r t) * (dot k u (d t) + r t))) x.l + -(2 * lam) * sum (fun t => own t * (dot k u (d t) + r t)) x.l
              + lam * lam * sum own x.l := by
          rw [← sum_lin3]
          exact sum_congr x.l (fun t => by rw [abs_mul_self]; ring)
        have lin : -(sum (fun t => own t * (dot k u (d t) + r t)) x.l) ≤ σ₁ + σ₂ := by
          have e2 : sum (fun t => own t * (dot k u (d t) + r t)) x.l = dot k u (fun j => sum (fun t => own t * d t j) x.l) + sum (fun t => own t * r t) x.l := by
            rw [← mean_d own, ← sum_add]
            exact sum_congr x.l (fun t => by ring)
          rw [e2]
          have b1 := le_trans (neg_le_abs _) (dot_unit hu hσ1)
          have b2 := le_trans (neg_le_abs _) hσ2
          exact le_cert (add_nonneg (sub_nonneg b1) (sub_nonneg b2)) (by ring)
        rw [e]
        exact le_cert (add_nonneg (sub_nonneg mk) (nonneg_mul (nonneg_mul zero_le_two hlam) (sub_nonneg lin))) (by ring)
      rw [c1, c2] at cs
      have k0 : 0 ≤ sum (fun t => x.w t * s t * b t) x.l :=
        sum_nonneg x.l (fun t => nonneg_mul (nonneg_mul (h.w_nonneg t) (hs0 t)) (le_of_lt (hb t)))
      exact le_of_sq_le hg (le_trans cs (le_trans (mul_le_mul_left k0 c3) hroot))
    rw [split]
    exact le_cert (add_nonneg (add_nonneg (sub_nonneg line) (sub_nonneg hpart)) (add_nonneg (sub_nonneg spart) (sub_nonneg hlast))) (by ring)
  -- Z (Σ p x - λ) = Σ w a (x - λ)
  have fin : sum (fun t => x.p t * (dot k u (d t) + r t)) x.l ≤ lam := by
    refine le_of_mul_le h.Z_pos ?_
    have e1 : x.Z * sum (fun t => x.p t * (dot k u (d t) + r t)) x.l = x.mean (fun t => x.a t * (dot k u (d t) + r t)) := by
      rw [← sum_mul]
      refine sum_congr x.l (fun t => ?_)
      rw [x.p_eq]
      exact eq_lin h.Zu (x.w t * x.a t * (dot k u (d t) + r t)) (by ring)
    have e2 : x.mean (fun t => x.a t * (dot k u (d t) + r t - lam)) = x.mean (fun t => x.a t * (dot k u (d t) + r t)) - lam * x.Z := by
      rw [show lam * x.Z = x.mean (fun t => lam * x.a t) from (x.mean_mul lam x.a).symm, ← mean_sub]
      exact x.mean_congr (fun t => by ring)
    rw [e1]
    rw [e2] at key
    exact le_cert (sub_nonneg key) (by ring)
  exact add_le_add fin (le_refl (x.mean ρ))
end Cell
end WitCert
