import WitCert.Attention.Subset
/-!
# The `jensen` form

For a set `S` of mass `α` put `u = Σ_S w (e^c - 1)`. Jensen's inequality replaces the lowered tokens,
`Σ_{S^c} w e^{-c} ≥ (1-α)² / Σ_{S^c} w e^c`; the resulting bound on the odds ratio is symmetric in `S` and its
complement, so the lighter of the two suffices and `α ≤ ½`. With `N = αη + (1-2α)u + u(η-u)`,
`TV ≤ (1-α) N / (N + 1 - α)`. The code evaluates this on cells `[α₀, α₁]` of masses, never at points.
-/
set_option synthInstance.maxSize 4000
universe u v w
namespace WitCert
variable {α : Type u} [OrderedField α]

/-- `N(α, u) = αη + (1-2α)u + u(η-u)`. -/
def jensenN (η m u : α) : α := m * η + (1 - 2 * m) * u + u * (η - u)
/-- `(1-α)N / (N + 1 - α)`. -/
def jensenValue (η m u : α) : α := (1 - m) * jensenN η m u / (jensenN η m u + (1 - m))
/-- The value of a cell `[m₀, m₁]`: `N̄ = m₁η + (1-2m₀)ū + ū(η-ū)`, then `(1-m₀)N̄ / (N̄ + 1 - m₀)`. -/
def jensenCell (η m₀ m₁ ub : α) : α :=
  (1 - m₀) * (m₁ * η + (1 - 2 * m₀) * ub + ub * (η - ub)) / ((m₁ * η + (1 - 2 * m₀) * ub + ub * (η - ub)) + (1 - m₀))

/-- `q N/(N + q)` grows with both. -/
theorem harmonic_mono {q q' N N' : α} (hq : 0 < q) (hN : 0 ≤ N) (h1 : q ≤ q') (h2 : N ≤ N') :
    q * N / (N + q) ≤ q' * N' / (N' + q') := by
  have hq' : 0 < q' := lt_of_lt_of_le hq h1
  have hN' : 0 ≤ N' := le_trans hN h2
  have d1 : 0 < N + q := lt_of_lt_of_le hq (le_cert hN (by ring))
  have d2 : 0 < N' + q' := lt_of_lt_of_le hq' (le_cert hN' (by ring))
  refine div_le d1 (le_of_mul_le d2 ?_)
  rw [show (N' + q') * (q' * N' / (N' + q') * (N + q)) = q' * N' * (N + q) from eq_lin (mul_inv_cancel d2) (q' * N' * (N + q)) (by ring)]
  exact le_cert (add_nonneg (nonneg_mul (nonneg_mul (sub_nonneg h1) hN) hN') (nonneg_mul (nonneg_mul (le_of_lt hq) (le_of_lt hq')) (sub_nonneg h2))) (by ring)

/-- `N` on an interval `[m₀, m₁]` of masses, at `ū = min(ub, (1 - 2m₀ + η)/2)`. -/
theorem jensenN_le_cell {η m m₀ m₁ u ub : α} (hη : 0 ≤ η) (hu : 0 ≤ u) (hub : u ≤ ub) (h0 : m₀ ≤ m) (h1 : m ≤ m₁) :
    jensenN η m u ≤ m₁ * η + (1 - 2 * m₀) * min ub ((1 - 2 * m₀ + η) / 2) + min ub ((1 - 2 * m₀ + η) / 2) * (η - min ub ((1 - 2 * m₀ + η) / 2)) := by
  -- first raise the mass, then u
  have s1 : jensenN η m u ≤ m₁ * η + (1 - 2 * m₀) * u + u * (η - u) := by
    show m * η + (1 - 2 * m) * u + u * (η - u) ≤ _
    exact le_cert (add_nonneg (nonneg_mul (sub_nonneg h1) hη) (nonneg_mul (nonneg_mul zero_le_two (sub_nonneg h0)) hu)) (by ring)
  refine le_trans s1 ?_
  have hc : 2 * ((1 - 2 * m₀ + η) / 2) = 1 - 2 * m₀ + η := mul_div_cancel zero_lt_two
  cases min_cases ub ((1 - 2 * m₀ + η) / 2) with
  | inl h =>
    rw [h.2]
    have h3 : 0 ≤ (1 - 2 * m₀ + η) - ub - u := by
      rw [← hc]
      exact nonneg_cert (add_nonneg (sub_nonneg h.1) (sub_nonneg (le_trans hub h.1))) (by ring)
    exact le_cert (nonneg_mul (sub_nonneg hub) h3) (by ring)
  | inr h =>
    rw [h.2]
    refine le_cert (sq_nonneg ((1 - 2 * m₀ + η) / 2 - u)) ?_
    exact eq_lin hc (u - (1 - 2 * m₀ + η) / 2) (by ring)
/-- One cell: for every mass `m ∈ [m₀, m₁]` and every `u ≤ ub`, the value at `(m, u)` is at most the cell's value at
`min(ub, (1 - 2m₀ + η)/2)`. -/
theorem jensenValue_le_cell {η m m₀ m₁ u ub : α} (hη : 0 ≤ η) (hu : 0 ≤ u) (huη : u ≤ η) (hub : u ≤ ub)
    (hm : 0 ≤ m) (hm2 : 2 * m ≤ 1) (h0 : m₀ ≤ m) (h1 : m ≤ m₁) :
    jensenValue η m u ≤ jensenCell η m₀ m₁ (min ub ((1 - 2 * m₀ + η) / 2)) := by
  have hq : 0 < 1 - m := lt_of_lt_of_le (inv_pos zero_lt_two)
    (le_cert (nonneg_mul half_nonneg (sub_nonneg hm2)) (eq_lin two_half (m - 1) (by ring)))
  have hN : 0 ≤ jensenN η m u := add_nonneg (add_nonneg (nonneg_mul hm hη) (nonneg_mul (sub_nonneg hm2) hu)) (nonneg_mul hu (sub_nonneg huη))
  exact harmonic_mono hq hN (le_cert (sub_nonneg h0) (by ring)) (jensenN_le_cell hη hu hub h0 h1)

namespace Cell
variable {ι : Type v} {x : Cell α ι}

/-- What is known about the lighter of the raised set and its complement. -/
structure JensenPoint (x : Cell α ι) (R m u : α) : Prop where
  m_nonneg : 0 ≤ m
  m_le_half : 2 * m ≤ 1
  u_nonneg : 0 ≤ u
  u_le_eta : u ≤ x.eta
  u_le_max : u ≤ m * (R - 1)
  spread : (u - m * x.eta) * (u - m * x.eta) ≤ m * (1 - m) * (x.Q - x.eta * x.eta)
  isSet : ∃ s, IsSet s ∧ x.mean s = m ∧ x.mean (fun t => s t * (x.r t - 1)) = u
  tv : x.TV ≤ jensenValue x.eta m u

theorem set_point (h : x.Sound) {s : ι → α} (hs : IsSet s) (R : α) (hR : ∀ t, x.r t ≤ R) :
    let u := x.mean (fun t => s t * (x.r t - 1))
    0 ≤ x.mean s ∧ 0 ≤ u ∧ u ≤ x.eta ∧ u ≤ x.mean s * (R - 1) ∧
      (u - x.mean s * x.eta) * (u - x.mean s * x.eta) ≤ x.mean s * (1 - x.mean s) * (x.Q - x.eta * x.eta) ∧
      ∃ s', IsSet s' ∧ x.mean s' = x.mean s ∧ x.mean (fun t => s' t * (x.r t - 1)) = u := by
  have h0 : 0 ≤ x.mean s := h.mean_nonneg (fun t => (hs.frac t).1)
  have hu0 : 0 ≤ x.mean (fun t => s t * (x.r t - 1)) := h.mean_nonneg (fun t => nonneg_mul (hs.frac t).1 (sub_nonneg (h.one_le_r t)))
  have hu1 : x.mean (fun t => s t * (x.r t - 1)) ≤ x.mean s * (R - 1) := by
    refine le_trans (h.mean_le (g := fun t => (R - 1) * s t) (fun t => ?_)) (le_of_eq ((x.mean_mul (R - 1) s).trans (mul_comm _ _)))
    exact le_cert (nonneg_mul (hs.frac t).1 (sub_nonneg (hR t))) (by ring)
  refine ⟨h0, hu0, ?_, hu1, ?_, s, hs, rfl, rfl⟩
  · exact h.mean_le (fun t => le_cert (nonneg_mul (hs.frac t).2 (sub_nonneg (h.one_le_r t))) (by ring))
  · have sp := subset_spread h.w_nonneg hs (fun t => x.r t - 1) x.l h.w_sum rfl rfl rfl rfl (fun e => le_antisymm (by
      refine le_trans hu1 (le_of_eq ?_)
      rw [show x.mean s = 0 from e]; ring) hu0)
    refine le_trans (le_of_eq ?_) (le_trans sp (le_of_eq ?_))
    · show (x.mean (fun t => s t * (x.r t - 1)) - x.mean s * x.eta) * (x.mean (fun t => s t * (x.r t - 1)) - x.mean s * x.eta)
        = (1 * x.mean (fun t => s t * (x.r t - 1)) - x.mean s * x.eta) * (1 * x.mean (fun t => s t * (x.r t - 1)) - x.mean s * x.eta)
      ring
    · show x.mean s * (1 - x.mean s) * (1 * x.Q - x.eta * x.eta) = _
      ring

/-- **jensen at the true set.** For the lighter side of the attack: `TV ≤ (1-α)N/(N+1-α)`.

Code: `witcert_core.meter.bounds.jensen.bound`.
`python: TV <= jensen_value(*light_side)` -/
theorem Sound.jensen_point (h : x.Sound) (R : α) (hR : ∀ t, x.r t ≤ R) : ∃ m u, x.JensenPoint R m u := by
  have at0 := h.attack
  have hs := at0.isSet
  have P1 := set_point h hs R hR
  have P2 := set_point h hs.compl R hR
  revert P1 P2
  generalize eU₀ : x.mean (fun t => x.raised t * x.a t) = U₀ at at0
  generalize eV₀ : x.mean (fun t => (1 - x.raised t) * x.a t) = V₀ at at0
  -- the raised set S, its mass m, and the sums of w r over S and its complement
  have em' : x.mean (fun t => 1 - x.raised t) = 1 - x.mean x.raised := (x.mean_sub (fun _ => 1) x.raised).trans (by rw [h.mean_const])
  have eU : x.mean (fun t => x.raised t * x.r t) = x.mean x.raised + x.mean (fun t => x.raised t * (x.r t - 1)) := by
    rw [← mean_add]; exact x.mean_congr (fun t => by ring)
  have eu' : x.mean (fun t => (1 - x.raised t) * (x.r t - 1)) = x.eta - x.mean (fun t => x.raised t * (x.r t - 1)) :=
    (x.mean_congr (fun t => by ring)).trans (x.mean_sub (fun t => x.r t - 1) (fun t => x.raised t * (x.r t - 1)))
  have eC : x.mean (fun t => (1 - x.raised t) * x.r t) = (1 - x.mean x.raised) + (x.eta - x.mean (fun t => x.raised t * (x.r t - 1))) := by
    rw [← em', ← eu', ← mean_add]; exact x.mean_congr (fun t => by ring)
  rw [em', eu']
  have hU : U₀ ≤ x.mean (fun t => x.raised t * x.r t) := by
    rw [← eU₀]; exact h.mean_le (fun t => mul_le_mul_left (hs.frac t).1 (h.upper t))
  have hU₀ : 0 ≤ U₀ := by rw [← eU₀]; exact h.mean_nonneg (fun t => nonneg_mul (hs.frac t).1 (h.a_nonneg t))
  have hCV : (1 - x.mean x.raised) * (1 - x.mean x.raised) ≤ V₀ * x.mean (fun t => (1 - x.raised t) * x.r t) := by
    rw [← em', ← eV₀]
    refine le_trans (sum_sq_le_of_one_le_mul (fun t => nonneg_mul (h.w_nonneg t) (hs.frac t).2) h.a_nonneg (fun t => le_of_lt (h.r_pos t)) h.lower x.l) (le_of_eq ?_)
    exact mul_congr (sum_congr x.l (fun t => by ring)) (sum_congr x.l (fun t => by ring))
  rw [eU] at hU
  rw [eC] at hCV
  have htv := at0.tv
  have hpos := at0.pos
  generalize x.mean x.raised = m at hU hCV htv
  generalize x.mean (fun t => x.raised t * (x.r t - 1)) = u at hU hCV
  intro P1 P2
  -- the odds bound, first for S itself
  have hodds : x.TV * (jensenN x.eta m u + (1 - m)) ≤ (1 - m) * jensenN x.eta m u := by
    refine le_of_mul_le hpos ?_
    have hC : 0 ≤ 1 - m + (x.eta - u) := add_nonneg P2.1 P2.2.1
    have k1 : U₀ * ((1 - m) * (1 - m)) ≤ U₀ * (V₀ * (1 - m + (x.eta - u))) := mul_le_mul_left hU₀ hCV
    have k2 : 0 ≤ V₀ * (1 - m + (x.eta - u)) := le_trans (sq_nonneg (1 - m)) hCV
    have k3 : 0 ≤ V₀ * (1 - m + (x.eta - u)) * (m + u - U₀) := nonneg_mul k2 (sub_nonneg hU)
    show (U₀ + V₀) * (x.TV * (m * x.eta + (1 - 2 * m) * u + u * (x.eta - u) + (1 - m)))
      ≤ (U₀ + V₀) * ((1 - m) * (m * x.eta + (1 - 2 * m) * u + u * (x.eta - u)))
    exact le_cert (add_nonneg (sub_nonneg k1) k3)
      (eq_lin htv (-(m * x.eta + (1 - 2 * m) * u + u * (x.eta - u) + (1 - m))) (by ring))
  have hden : ∀ {m u : α}, 0 ≤ m → 2 * m ≤ 1 → 0 ≤ u → u ≤ x.eta → 0 < jensenN x.eta m u + (1 - m) := fun {m u} hm hm2 hu hue => by
    have hN : 0 ≤ jensenN x.eta m u := add_nonneg (add_nonneg (nonneg_mul hm h.eta_nonneg) (nonneg_mul (sub_nonneg hm2) hu)) (nonneg_mul hu (sub_nonneg hue))
    exact lt_of_lt_of_le (inv_pos zero_lt_two) (le_cert (add_nonneg hN (nonneg_mul half_nonneg (sub_nonneg hm2))) (eq_lin two_half (m - 1) (by ring)))
  cases le_total (2 * m) 1 with
  | inl hm => exact ⟨m, u, P1.1, hm, P1.2.1, P1.2.2.1, P1.2.2.2.1, P1.2.2.2.2.1, P1.2.2.2.2.2, le_div (hden P1.1 hm P1.2.1 P1.2.2.1) hodds⟩
  | inr hm =>
    -- the complement is lighter, and its bound is larger
    have hm' : 2 * (1 - m) ≤ 1 := le_cert (sub_nonneg hm) (by ring)
    refine ⟨1 - m, x.eta - u, P2.1, hm', P2.2.1, P2.2.2.1, P2.2.2.2.1, P2.2.2.2.2.1, P2.2.2.2.2.2, le_div (hden P2.1 hm' P2.2.1 P2.2.2.1) ?_⟩
    have eN : jensenN x.eta (1 - m) (x.eta - u) = jensenN x.eta m u := by
      show (1 - m) * x.eta + (1 - 2 * (1 - m)) * (x.eta - u) + (x.eta - u) * (x.eta - (x.eta - u)) = m * x.eta + (1 - 2 * m) * u + u * (x.eta - u)
      ring
    rw [eN]
    have hN : 0 ≤ jensenN x.eta m u := by
      rw [← eN]
      exact add_nonneg (add_nonneg (nonneg_mul P2.1 h.eta_nonneg) (nonneg_mul (sub_nonneg hm') P2.2.1)) (nonneg_mul P2.2.1 (sub_nonneg P2.2.2.1))
    generalize jensenN x.eta m u = N at hodds hN
    have htv0 := h.TV_nonneg
    cases le_or_lt (N + (1 - m)) 0 with
    | inl hz =>
      have e1 : 0 ≤ -(1 - m) := nonneg_cert (add_nonneg (sub_nonneg hz) hN) (by ring)
      have e2 : m = 1 := le_antisymm (le_of_sub_nonneg P2.1) (le_of_sub_nonneg (nonneg_cert e1 (by ring)))
      have e3 : N = 0 := le_antisymm (le_cert (add_nonneg (sub_nonneg hz) P2.1) (by ring)) hN
      have e4 : x.TV * 1 = 0 := by
        have e5 := htv
        rw [e2] at e5
        have e6 : x.TV * (U₀ + V₀) ≤ (U₀ + V₀) * 0 := by
          rw [e5]
          have V0 : 0 ≤ V₀ := by rw [← eV₀]; exact h.mean_nonneg (fun t => nonneg_mul (hs.frac t).2 (h.a_nonneg t))
          exact le_cert V0 (by ring)
        have e7 := le_of_mul_le hpos (le_trans (le_of_eq (mul_comm _ _)) e6)
        exact (show x.TV * 1 = x.TV from by ring).trans (le_antisymm e7 htv0)
      rw [e3, e2]
      exact le_cert htv0 (eq_lin e4 (-2) (by ring))
    | inr hp =>
      -- TV ≤ (1-m)N/(N+1-m) ≤ mN/(N+m)
      refine le_of_mul_le hp ?_
      have k : 0 ≤ (2 * m - 1) * (N * N) := nonneg_mul (sub_nonneg hm) (nonneg_mul hN hN)
      have k2 : 0 ≤ (N + m) * ((1 - m) * N - x.TV * (N + (1 - m))) := nonneg_mul (add_nonneg hN P1.1) (sub_nonneg hodds)
      exact le_cert (add_nonneg k k2) (by ring)

/-- A cap of `u = Σ_S w (e^c - 1)` for a set of mass at most `m₁ ≤ ½`, as the code takes it. -/
theorem Sound.cap (h : x.Sound) {s : ι → α} (hs : IsSet s) (R : α) (hR : ∀ t, x.r t ≤ R) {η V m₁ ub : α} (hη : x.eta ≤ η)
    (hV : x.Q - x.eta * x.eta ≤ V) (hm : x.mean s ≤ m₁) (half : 2 * m₁ ≤ 1)
    (hub : η ≤ ub ∨ m₁ * (R - 1) ≤ ub ∨ ∃ σ, 0 ≤ σ ∧ m₁ * (1 - m₁) * V ≤ σ * σ ∧ m₁ * η + σ ≤ ub) :
    x.mean (fun t => s t * (x.r t - 1)) ≤ ub := by
  have P := set_point h hs R hR
  have hR1 : 0 ≤ R - 1 := sub_nonneg (le_trans h.one_le_A (h.A_le hR))
  cases hub with
  | inl k => exact le_trans P.2.2.1 (le_trans hη k)
  | inr k => cases k with
    | inl k => exact le_trans P.2.2.2.1 (le_trans (mul_le_mul_right hR1 hm) k)
    | inr k => cases k with
      | intro σ k =>
        have h1 : m₁ ≤ 1 := le_of_mul_le zero_lt_two (le_trans half (le_cert zero_le_one (by ring)))
        have hm1 : 0 ≤ m₁ := le_trans P.1 hm
        have hV0 : 0 ≤ x.Q - x.eta * x.eta := sub_nonneg (h.mean_sq_le (fun t => x.r t - 1))
        have hs : m₁ * (1 - m₁) * (x.Q - x.eta * x.eta) ≤ σ * σ :=
          le_trans (mul_le_mul_left (nonneg_mul hm1 (sub_nonneg h1)) hV) k.2.1
        have sm := spread_mono (μ := 1) P.1 hm h1 P.2.2.1 hV0 k.1 hs (le_trans (le_of_eq (by ring)) P.2.2.2.2.1)
        exact le_cert (add_nonneg (add_nonneg (sub_nonneg sm) (nonneg_mul hm1 (sub_nonneg hη))) (sub_nonneg k.2.2)) (by ring)

/-- **jensen with something to spare.** The true radii `e^c` are not known, only `e^{c_t} ≤ g_t + μ x_t` with `x ≥ 0` and
`Σ w x ≤ 1`. Then `η` and the caps of `u`, taken from `g`, grow by `μ` once, and `TV ≤ B` as in `jensen`.

Code: `witcert_core.meter.bounds.jensen.bound_fields` (`Fields.spare`), `witcert_core.meter.bounds.joint.bound`.
`python: TV <= spared_all.jensen_cells(16) and TV <= spared_all.code("jensen")` -/
theorem Sound.tv_le_spare {κ : Type w} (h : x.Sound) (R' : α) (hR' : ∀ t, x.r t ≤ R') {g ξ : ι → α} {μ : α} (hμ : 0 ≤ μ)
    (hg : ∀ t, 1 ≤ g t) (hξ0 : ∀ t, 0 ≤ ξ t) (hξ : x.mean ξ ≤ 1) (hr : ∀ t, x.r t ≤ g t + μ * ξ t) (R : α) (hR : ∀ t, g t ≤ R) {η V : α}
    (hη : x.mean (fun t => g t - 1) ≤ η)
    (hV : x.mean (fun t => (g t - 1) * (g t - 1)) - x.mean (fun t => g t - 1) * x.mean (fun t => g t - 1) ≤ V) (m₀ m₁ ub : κ → α) (B : α)
    (cover : ∀ m, 0 ≤ m → 2 * m ≤ 1 → ∃ i, m₀ i ≤ m ∧ m ≤ m₁ i) (half : ∀ i, 2 * m₁ i ≤ 1)
    (hub : ∀ i, η ≤ ub i ∨ m₁ i * (R - 1) ≤ ub i ∨ ∃ s, 0 ≤ s ∧ m₁ i * (1 - m₁ i) * V ≤ s * s ∧ m₁ i * η + s ≤ ub i)
    (hB : ∀ i, jensenCell (η + μ) (m₀ i) (m₁ i) (min (ub i + μ) ((1 - 2 * m₀ i + (η + μ)) / 2)) ≤ B) : x.TV ≤ B := by
  -- over any set the true radii exceed g by at most μ
  have over : ∀ s : ι → α, (∀ t, 0 ≤ s t ∧ 0 ≤ 1 - s t) → x.mean (fun t => s t * (x.r t - 1)) ≤ x.mean (fun t => s t * (g t - 1)) + μ := fun s hs => by
    have k : x.mean (fun t => s t * (x.r t - 1)) ≤ x.mean (fun t => 1 * (s t * (g t - 1)) + μ * ξ t) := h.mean_le (fun t =>
      le_cert (add_nonneg (nonneg_mul (hs t).1 (sub_nonneg (hr t))) (nonneg_mul (hs t).2 (nonneg_mul hμ (hξ0 t)))) (by ring))
    rw [mean_lin] at k
    exact le_trans k (le_cert (nonneg_mul hμ (sub_nonneg hξ)) (by ring))
  have hy : (Cell.mk x.l x.w g (fun _ => 1)).Sound := ⟨h.w_nonneg, h.w_sum, hg, fun t => le_trans (hg t) (le_of_eq (by ring)), hg⟩
  have hηx : x.eta ≤ η + μ := by
    have k := over (fun _ => 1) (fun _ => ⟨zero_le_one, le_of_eq (by ring)⟩)
    rw [x.mean_congr (f := fun t => 1 * (x.r t - 1)) (g := fun t => x.r t - 1) (fun t => by ring),
      x.mean_congr (f := fun t => 1 * (g t - 1)) (g := fun t => g t - 1) (fun t => by ring)] at k
    exact le_trans k (add_le_add hη (le_refl μ))
  cases h.jensen_point R' hR' with
  | intro m H => cases H with
    | intro u P => cases cover m P.m_nonneg P.m_le_half with
      | intro i hi => cases P.isSet with
        | intro s S =>
          have huη : u ≤ η + μ := le_trans P.u_le_eta hηx
          have hq : 0 < 1 - m := lt_of_lt_of_le (inv_pos zero_lt_two)
            (le_cert (nonneg_mul half_nonneg (sub_nonneg P.m_le_half)) (eq_lin two_half (m - 1) (by ring)))
          have hN : 0 ≤ jensenN x.eta m u := add_nonneg (add_nonneg (nonneg_mul P.m_nonneg h.eta_nonneg)
            (nonneg_mul (sub_nonneg P.m_le_half) P.u_nonneg)) (nonneg_mul P.u_nonneg (sub_nonneg P.u_le_eta))
          have hup : jensenN x.eta m u ≤ jensenN (η + μ) m u := le_cert
            (add_nonneg (nonneg_mul P.m_nonneg (sub_nonneg hηx)) (nonneg_mul P.u_nonneg (sub_nonneg hηx))) (by
              show m * (η + μ) + (1 - 2 * m) * u + u * (η + μ - u) - (m * x.eta + (1 - 2 * m) * u + u * (x.eta - u)) = _
              ring)
          refine le_trans P.tv (le_trans (harmonic_mono hq hN (le_refl _) hup) (le_trans ?_ (hB i)))
          refine jensenValue_le_cell (le_trans P.u_nonneg huη) P.u_nonneg huη ?_ P.m_nonneg P.m_le_half hi.1 hi.2
          have c : x.mean (fun t => s t * (g t - 1)) ≤ ub i :=
            hy.cap S.1 R hR hη hV (show x.mean s ≤ m₁ i from by rw [S.2.1]; exact hi.2) (half i) (hub i)
          rw [← S.2.2]
          exact le_trans (over s S.1.frac) (add_le_add c (le_refl μ))

/-- **jensen.** Let intervals `[m₀ i, m₁ i]` cover `[0, ½]`, let `ub i` be at least one of `η`, `m₁ (R - 1)`,
`m₁ η + √(m₁ (1 - m₁) V)`, and let `B` be at least every interval's value at `ū = min(ub, (1 - 2 m₀ + η)/2)`. Then `TV ≤ B`,
for `η` and `V` rounded up from `Σ w (e^c - 1)` and `Q - (Σ w (e^c - 1))²`.

Code: `witcert_core.meter.bounds.jensen.bound`, `witcert_core.meter.bounds.jensen.gain_bound`.
`python: TV <= jensen_cells(16) and all(jensen_value(m, u) <= code("jensen") for m, u in light_sets)` -/
theorem Sound.tv_le_jensen {κ : Type w} (h : x.Sound) (R : α) (hR : ∀ t, x.r t ≤ R) {η V : α} (hη : x.eta ≤ η)
    (hV : x.Q - x.eta * x.eta ≤ V) (m₀ m₁ ub : κ → α) (B : α)
    (cover : ∀ m, 0 ≤ m → 2 * m ≤ 1 → ∃ i, m₀ i ≤ m ∧ m ≤ m₁ i) (half : ∀ i, 2 * m₁ i ≤ 1)
    (hub : ∀ i, η ≤ ub i ∨ m₁ i * (R - 1) ≤ ub i ∨ ∃ s, 0 ≤ s ∧ m₁ i * (1 - m₁ i) * V ≤ s * s ∧ m₁ i * η + s ≤ ub i)
    (hB : ∀ i, jensenCell η (m₀ i) (m₁ i) (min (ub i) ((1 - 2 * m₀ i + η) / 2)) ≤ B) : x.TV ≤ B := by
  have z : ∀ y : α, y + 0 = y := fun y => by ring
  refine h.tv_le_spare R hR (g := x.r) (ξ := fun _ => 0) (μ := 0) (le_refl 0) h.one_le_r (fun _ => le_refl 0)
    (le_trans (le_of_eq (h.mean_const 0)) zero_le_one) (fun t => le_of_eq (by ring)) R hR hη hV m₀ m₁ ub B cover half hub (fun i => ?_)
  rw [z, z]
  exact hB i
end Cell
end WitCert
