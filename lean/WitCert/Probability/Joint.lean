import WitCert.Attention.Jensen
import WitCert.Probability.Law
/-!
# The probabilistic tier without a union over tokens

A union over the `S` tokens of a cell costs `ln(2S/δ)` in place of `ln(2/δ)`. The *exact* weights `p` do not depend on the dither, so one
event is enough: with `|ε_t| ≤ b_t + σ_t y_t`, `P(Σ p e^{θy} > K) ≤ δ` whatever the dependence between tokens. On it the *served* weights have
`Σ w x ≤ 1` for `x_t = e^{(θ - σ_t)y_t - b_t}/(K A)`, and `e^{|ε_t|} ≤ g_t + μ x_t` (a power lies below its tangents): the true radii exceed
the known `g` by `μ` once, over any set of tokens, which is all that `jensen` asks for (`tv_le_spare`).
-/
set_option synthInstance.maxSize 4000
universe u v w
namespace WitCert
section
variable {α : Type u} [OrderedField α] {ι : Type v} {Ω : Type w}

theorem Law.sum_E (L : Law α Ω) (f : ι → Ω → α) (l : List ι) : L.E (fun o => sum (fun t => f t o) l) = sum (fun t => L.E (f t)) l := by
  induction l with
  | nil => exact L.const 0
  | cons t l ih =>
    show L.E (fun o => f t o + sum (fun t => f t o) l) = L.E (f t) + sum (fun t => L.E (f t)) l
    rw [L.add, ih]

/-- **One event for all tokens**: if each `E X_t ≤ δ K` for `X_t ≥ 0` and the weights are fixed and sum to 1, then
`P(Σ p X > K) ≤ δ`, whatever the dependence between tokens.

Code: `witcert_core.meter.bounds.joint.bound`.
`python: dither.prob(lambda o: (dither.err(0, o) ** 2 + dither.err(1, o) ** 2) / 2 > kappa) <= max(dither.space.mean(lambda o: dither.err(t, o) ** 2) for t in (0, 1)) / kappa` -/
theorem weighted_markov (L : Law α Ω) (X : ι → Ω → α) (l : List ι) {p : ι → α} {δ K : α} (hK : 0 < K) (hp0 : ∀ t, 0 ≤ p t)
    (hp : sum p l = 1) (hX : ∀ t o, 0 ≤ X t o) (h : ∀ t, L.E (X t) ≤ δ * K) :
    L.P (fun o => Law.gtB K (sum (fun t => p t * X t o) l)) ≤ δ := by
  have h1 : L.E (fun o => sum (fun t => p t * X t o) l) ≤ δ * K := by
    rw [L.sum_E (fun t o => p t * X t o)]
    refine le_trans (sum_le l (fun t => le_trans (le_of_eq (L.smul (p t) (X t))) (mul_le_mul_left (hp0 t) (h t)))) (le_of_eq ?_)
    rw [sum_congr l (g := fun t => δ * K * p t) (fun t => by ring), sum_mul, hp]
    ring
  have h2 : K * L.P (fun o => Law.gtB K (sum (fun t => p t * X t o) l)) ≤ L.E (fun o => sum (fun t => p t * X t o) l) := by
    refine le_trans (le_of_eq (L.smul K _).symm) (L.mono (fun o => ?_))
    show K * Law.ind (Law.gtB K (sum (fun t => p t * X t o) l)) ≤ sum (fun t => p t * X t o) l
    cases Law.gt_cases K (sum (fun t => p t * X t o) l) with
    | inl k =>
      rw [k.2]
      exact le_trans (le_of_eq (show K * (0 : α) = 0 from by ring)) (sum_nonneg l (fun t => nonneg_mul (hp0 t) (hX t o)))
    | inr k =>
      rw [k.2]
      exact le_trans (le_of_eq (show K * (1 : α) = K from by ring)) (le_of_lt k.1)
  exact le_of_mul_le hK (le_trans h2 (le_trans h1 (le_of_eq (by ring))))

/-- **The event in terms of the served weights.** With valid radii `r = e^{b + σy}` (not known), `Σ p X ≤ K` for the exact weights and
`A' ≥ A = Σ w r`, the served weights have `Σ w X/(r K A') ≤ 1`.

Code: `witcert_core.meter.bounds.joint.bound`.
`python: cell.mean([y / (x * dot(cell.p, grown) * A) for x, y in zip(cell.r, grown)]) <= 1` -/
theorem Cell.Sound.joint_event {x : Cell α ι} (h : x.Sound) {X : ι → α} {K A' : α} (hX : ∀ t, 0 ≤ X t) (hK : 0 < K) (hA : x.A ≤ A')
    (hp : sum (fun t => x.p t * X t) x.l ≤ K) : x.mean (fun t => X t / (x.r t * (K * A'))) ≤ 1 := by
  have A0 : 0 < A' := lt_of_lt_of_le h.A_pos hA
  have k : ∀ t, x.w t * (X t / (x.r t * (K * A'))) ≤ K⁻¹ * (x.p t * X t) := fun t => by
    have d := mul_pos (h.r_pos t) (mul_pos hK A0)
    have a1 : 1 ≤ A' * x.u := le_trans h.one_le_Au (mul_le_mul_right h.u_nonneg hA)
    have a2 : 1 ≤ x.r t * x.a t * (A' * x.u) := le_trans a1 (le_cert
      (nonneg_mul (le_trans zero_le_one a1) (sub_nonneg (h.lower t))) (by ring))
    have a3 : X t / (x.r t * (K * A')) ≤ K⁻¹ * (x.u * x.a t * X t) := by
      refine div_le d (le_trans (le_cert (y := X t * (x.r t * x.a t * (A' * x.u))) (nonneg_mul (hX t) (sub_nonneg a2)) (by ring)) (le_of_eq ?_))
      exact eq_lin (mul_inv_cancel hK) (-(X t * (x.r t * x.a t * (A' * x.u)))) (by ring)
    refine le_trans (mul_le_mul_left (h.w_nonneg t) a3) (le_of_eq ?_)
    rw [x.p_eq]
    ring
  refine le_trans (sum_le x.l k) ?_
  rw [sum_mul]
  exact le_trans (mul_le_mul_left (inv_nonneg hK) hp) (le_of_eq ((mul_comm _ _).trans (mul_inv_cancel hK)))

/-- **The bound on `A` by iteration**: from `r_t ≤ g_t + μ x_t` and `Σ w x ≤ 1` follows `A ≤ Σ w g + μ`.

Code: `witcert_core.meter.bounds.joint.bound` (`log_a`).
`python: A <= spared_all.mean(spared_all.r) + spare` -/
theorem Cell.Sound.joint_A {x : Cell α ι} (h : x.Sound) {g ξ : ι → α} {μ : α} (hμ : 0 ≤ μ) (hξ : x.mean ξ ≤ 1)
    (hr : ∀ t, x.r t ≤ g t + μ * ξ t) : x.A ≤ x.mean g + μ := by
  have k := h.mean_le (g := fun t => 1 * g t + μ * ξ t) (fun t => le_trans (hr t) (le_of_eq (by ring)))
  rw [mean_lin] at k
  exact le_trans k (le_cert (nonneg_mul hμ (sub_nonneg hξ)) (by ring))

/-- **From the event to the claim**: if a cell's bound is right whenever `Σ p X ≤ K`, it is wrong with probability at most `δ`.

Code: `witcert_core.meter.bounds.joint.bound`.
`python: dither.prob(lambda o: (dither.err(0, o) ** 2 + dither.err(1, o) ** 2) / 2 > kappa) <= max(dither.space.mean(lambda o: dither.err(t, o) ** 2) for t in (0, 1)) / kappa` -/
theorem joint_claim (L : Law α Ω) (X : ι → Ω → α) (l : List ι) {p : ι → α} {δ K : α} (TV B : Ω → α) (hK : 0 < K) (hp0 : ∀ t, 0 ≤ p t)
    (hp : sum p l = 1) (hX : ∀ t o, 0 ≤ X t o) (h : ∀ t, L.E (X t) ≤ δ * K) (hB : ∀ o, sum (fun t => p t * X t o) l ≤ K → TV o ≤ B o) :
    L.P (fun o => Law.gtB (B o) (TV o)) ≤ δ := by
  refine le_trans (L.P_mono (fun o => ?_)) (weighted_markov L X l hK hp0 hp hX h)
  have b := hB o
  show Law.gtB (B o) (TV o) = true → Law.gtB K (sum (fun t => p t * X t o) l) = true
  cases Law.gt_cases K (sum (fun t => p t * X t o) l) with
  | inr k => intro _; exact k.2
  | inl k =>
    cases Law.gt_cases (B o) (TV o) with
    | inl m => intro e; rw [m.2] at e; exact Bool.noConfusion e
    | inr m => exact absurd (b k.1) m.1
end

section
variable {α : Type u} [ExpField α] {Ω : Type w}

/-- **Both signs at once**: a sub-Gaussian `X` has `E e^{λ|X|} ≤ 2 e^{λ²v/2}` for `λ ≥ 0`.

Code: `witcert_core.meter.bounds.joint.bound` (`log_k`).
`python: dither.space.mean(lambda o: exp_down(abs(lam) * abs(dither.centred(o)))) <= 2 * exp_up(lam * lam * dither.sigma_sq() / 2)` -/
theorem mgf_abs (L : Law α Ω) (X : Ω → α) {v : α} (hmgf : ∀ lam : α, L.E (fun o => exp (lam * X o)) ≤ exp (2⁻¹ * (lam * lam * v)))
    (lam : α) : L.E (fun o => exp (lam * abs (X o))) ≤ 2 * exp (2⁻¹ * (lam * lam * v)) := by
  have h1 := hmgf lam
  have h2 := hmgf (-lam)
  rw [show -lam * -lam * v = lam * lam * v from by ring] at h2
  have h3 : L.E (fun o => exp (lam * abs (X o))) ≤ L.E (fun o => exp (lam * X o) + exp (-lam * X o)) := L.mono (fun o => by
    cases abs_cases (X o) with
    | inl k => rw [k.2]; exact le_cert (exp_nonneg (-lam * X o)) (by ring)
    | inr k =>
      rw [k.2, show lam * -(X o) = -lam * X o from by ring]
      exact le_cert (exp_nonneg (lam * X o)) (by ring))
  rw [L.add] at h3
  exact le_trans h3 (le_trans (add_le_add h1 h2) (le_of_eq (by ring)))

/-- The exponential lies below its chords: `e^{sz} ≤ (1 - s) + s e^z` for `0 ≤ s ≤ 1`. -/
theorem exp_chord {s : α} (h0 : 0 ≤ s) (h1 : s ≤ 1) (z : α) : exp (s * z) ≤ (1 - s) + s * exp z := by
  have a : exp (s * z) * (1 + (1 - s) * z) ≤ exp z := by
    have k := mul_le_mul_left (exp_nonneg (s * z)) (one_add_le_exp ((1 - s) * z))
    rw [← exp_add, show s * z + (1 - s) * z = z from by ring] at k
    exact k
  have b : exp (s * z) * (1 + -(s * z)) ≤ 1 := by
    have k := mul_le_mul_left (exp_nonneg (s * z)) (one_add_le_exp (-(s * z)))
    rw [exp_mul_neg] at k
    exact k
  exact le_cert (add_nonneg (nonneg_mul h0 (sub_nonneg a)) (nonneg_mul (sub_nonneg h1) (sub_nonneg b))) (by ring)

/-- **A token's error on the event lies below a tangent.** With `s(θ - σ) = σ`, `0 ≤ s ≤ 1` and `k = ln(K A)`, for any point of touch `z₀`,
`e^{b + σy} ≤ g + μ e^{(θ - σ)y - b - k}`, `g = (1 - s) e^{b + s(k + b) + s z₀}` and `μ = s e^{b + s(k + b) + (s - 1) z₀}`: a choice of `z₀` for each
token gives all tangents the same slope `μ`.

Code: `witcert_core.meter.bounds.joint._tangents`.
`python: all(joint.error(t, y) <= joint.tangent(t, y) for t in range(joint.S) for y in joint.deviations)` -/
theorem joint_tangent {b σ θ y k s : α} (hs : s * (θ - σ) = σ) (h0 : 0 ≤ s) (h1 : s ≤ 1) (z : α) :
    exp (b + σ * y) ≤ (1 - s) * exp (b + s * (k + b) + s * z) + s * exp (b + s * (k + b) + (s - 1) * z) * exp ((θ - σ) * y - b - k) := by
  have c := exp_chord h0 h1 ((θ - σ) * y - b - k - z)
  have m := mul_le_mul_left (exp_nonneg (b + s * (k + b) + s * z)) c
  have e1 : exp (b + s * (k + b) + s * z) * exp (s * ((θ - σ) * y - b - k - z)) = exp (b + σ * y) := by
    rw [← exp_add]
    exact congrArg exp (eq_lin hs y (by ring))
  have e2 : exp (b + s * (k + b) + s * z) * exp ((θ - σ) * y - b - k - z)
      = exp (b + s * (k + b) + (s - 1) * z) * exp ((θ - σ) * y - b - k) := by
    rw [← exp_add, ← exp_add]
    exact congrArg exp (by ring)
  rw [e1] at m
  exact le_trans m (le_of_eq (eq_lin e2 s (by ring)))
end
end WitCert
