import WitCert.Probability.Rounding
/-!
# The probabilistic tier: from a dither row to a radius that holds with probability `1 - δ`

A *row* is one offset per channel, uniform on the grid, independent between the channels. A token written with a row
that is independent of the token's history `ξ` (its key, its scales, the queries that will read it: everything they are
computed from) has logit error `Σ_j q_j r_j`, `r_j = s_j(rd(x_j/s_j + u_j) - u_j) - x_j`, and
* `|r_j| ≤ s_j/2` always,
* `|E r_j| ≤ s_j h` with `h = 1/2^{n+1}`, and `r_j - E r_j` is sub-Gaussian with proxy `s_j²(1 - 4⁻ⁿ)/12`,
* so `|Σ q r| ≤ t + Σ|q| s h` except with probability `2e^{-ℓ}`, when `t² ≥ 2ℓσ²`.
Between tokens no independence is used (a whole forward pass shares one row): the union bound takes marginals.
-/
set_option synthInstance.maxSize 4000
universe u v w x
namespace WitCert

section
variable {α : Type u} [OrderedField α]
/-- Half the spacing of `2ⁿ` points on an interval of length 1. -/
def halfStep (n : Nat) : α := (2 * pow 2 n)⁻¹
/-- A map to a nearest integer: at most ½ away, values differ by integers. Ties are free. -/
structure Nearest (rd : α → α) : Prop where
  near : ∀ z, 2 * abs (rd z - z) ≤ 1
  int : ∀ z w, ∃ n : Nat, rd z = rd w + ofNat n ∨ rd w = rd z + ofNat n
/-- Residual `x̂ - x` of subtractive dither with step `s` and offset `u`. -/
def residual (rd : α → α) (s x u : α) : α := s * (rd (x / s + u) - u) - x

/-- A step that can code the input: positive, or 0 for an input that is 0. -/
def Step (s x : α) : Prop := 0 < s ∨ (s = 0 ∧ x = 0)
theorem residual_zero (rd : α → α) {s x : α} (h : s = 0 ∧ x = 0) (u : α) : residual rd s x u = 0 := by
  show s * (rd (x / s + u) - u) - x = 0
  rw [h.1, h.2]; ring

/-- **The residual is at most half a step**, whatever the offset.

Code: `witcert_core.quantizers.dither.dequantize_int8`, `witcert_core.cache.radii.radius_dither` (deterministic term).
`python: all(abs(x) <= steps[i // 4] / 2 for i, x in enumerate(residual))` -/
theorem residual_le {rd : α → α} (hrd : Nearest rd) {s x : α} (hs : Step s x) (u : α) : abs (residual rd s x u) ≤ s / 2 := by
  cases hs with
  | inr hz =>
    rw [residual_zero rd hz u, hz.1]
    exact le_of_eq ((abs_of_nonneg (le_refl 0)).trans (show (0 : α) = 0 / 2 from by ring))
  | inl hs =>
    have e : residual rd s x u = s * (rd (x / s + u) - (x / s + u)) := by
      show s * (rd (x / s + u) - u) - x = _
      exact eq_lin (mul_div_cancel (a := x) hs) 1 (by ring)
    rw [e, abs_mul_nonneg (le_of_lt hs)]
    exact le_div zero_lt_two (le_cert (nonneg_mul (le_of_lt hs) (sub_nonneg (hrd.near (x / s + u)))) (by ring))

theorem pow_two_pos (n : Nat) : (0 : α) < pow 2 n := by
  induction n with
  | zero => exact zero_lt_one
  | succ n ih => exact mul_pos zero_lt_two ih
theorem halfStep_pos (n : Nat) : (0 : α) < halfStep n := inv_pos (mul_pos zero_lt_two (pow_two_pos n))
theorem halfStep_mul (n : Nat) : 2 * halfStep n * (pow 2 n : α) = 1 :=
  (show 2 * halfStep n * (pow 2 n : α) = 2 * pow 2 n * halfStep n from by ring).trans (mul_inv_cancel (mul_pos zero_lt_two (pow_two_pos n)))
theorem twoPow_succ (n : Nat) : ∃ M, twoPow n = M + 1 := by
  induction n with
  | zero => exact ⟨0, rfl⟩
  | succ n ih => cases ih with
    | intro M h => exact ⟨twoPow n + M, by
        show twoPow n + twoPow n = twoPow n + M + 1
        rw [h]
        rfl⟩
/-- A variable uniform on the `2ⁿ` grid points `(2j + 1)h - ½`. -/
def Uniform {Ω : Type v} (L : Law α Ω) (n : Nat) (u : Ω → α) : Prop := ∀ f : α → α, L.E (fun o => f (u o)) = (dither n (halfStep n)).E f

/-- **Law of the residual.** For a fixed input there is an offset `|o| ≤ h` such that the residual has the law of
`s(o - y)`, `y` a sum of `n` independent signs: `2ⁿ` equally spaced points.

Code: `witcert_core.quantizers.dither.quantize_int8`.
`python: is_shifted_grid(residual_values(y, step, n), step, n)` -/
theorem residual_law {Ω : Type v} (L : Law α Ω) {n : Nat} {u : Ω → α} (hu : Uniform L n u) {rd : α → α} (hrd : Nearest rd)
    {s : α} (hs : 0 < s) (x : α) :
    ∃ o, abs o ≤ halfStep n ∧ ∀ f : α → α, L.E (fun ω => f (residual rd s x (u ω))) = (dither n (halfStep n)).E (fun y => f (s * (o - y))) := by
  cases twoPow_succ n with
  | intro M hM =>
    have eN : (ofNat (M + 1) : α) = pow 2 n := by rw [← hM, ofNat_twoPow]
    have hh : 2 * halfStep n * (ofNat (M + 1) : α) = 1 := by rw [eN]; exact halfStep_mul n
    cases dither_error (y := x / s) rd hrd.int hrd.near hh (halfStep_pos n) with
    | intro o H =>
      refine ⟨o, H.1, fun f => ?_⟩
      rw [hu (fun v => f (residual rd s x v))]
      refine le_antisymm (le_of_mul_le (pow_two_pos n) (le_of_eq ?_)) (le_of_mul_le (pow_two_pos n) (le_of_eq (Eq.symm ?_)))
      all_goals
        rw [dither_grid, dither_grid, hM]
        have k := H.2 (fun e => f (s * e))
        refine Eq.trans (rsum_congr (M + 1) (fun j => congrArg f ?_)) (k.trans (rsum_congr (M + 1) (fun j => congrArg f ?_)))
        · show s * (rd (x / s + halfStep n * (2 * ofNat j + 1 - pow 2 n)) - halfStep n * (2 * ofNat j + 1 - pow 2 n)) - x
            = s * (rd (x / s + halfStep n * (2 * ofNat j + 1 - ofNat (M + 1))) - (x / s + halfStep n * (2 * ofNat j + 1 - ofNat (M + 1))))
          rw [eN]
          exact eq_lin (mul_div_cancel (a := x) hs) 1 (by ring)
        · show s * (o - halfStep n * (2 * ofNat j + 1 - ofNat (M + 1))) = s * (o - halfStep n * (2 * ofNat j + 1 - pow 2 n))
          rw [eN]

/-- The mean of the residual is `s o`. -/
theorem residual_mean {n : Nat} (s o : α) : (dither n (halfStep n)).E (fun y => s * (o - y)) = s * o := by
  rw [(dither n (halfStep n)).congr (f := fun y => s * (o - y)) (g := fun y => -s * y + s * o) (fun y => by ring), Law.affine, dither_mean]
  ring
/-- **Bias.** `|E r| ≤ s h`, `h = 1/2^{n+1}`: the bias term of the radius.

Code: `witcert_core.cache.radii.radius_dither` (`2^{-n-1}`).
`python: abs(mean(residual_values(y, step, n))) <= step * half_step(n)` -/
theorem residual_bias {Ω : Type v} (L : Law α Ω) {n : Nat} {u : Ω → α} (hu : Uniform L n u) {rd : α → α} (hrd : Nearest rd)
    {s x : α} (hs : Step s x) : abs (L.E (fun ω => residual rd s x (u ω))) ≤ s * halfStep n := by
  cases hs with
  | inr hz =>
    rw [L.congr (g := fun _ => 0) (fun ω => residual_zero rd hz (u ω)), L.const, hz.1]
    exact le_of_eq ((abs_of_nonneg (le_refl 0)).trans (show (0 : α) = 0 * halfStep n from by ring))
  | inl hs => cases residual_law L hu hrd hs x with
  | intro o H =>
    have e := H.2 (fun y => y)
    rw [residual_mean] at e
    rw [e, abs_mul_nonneg (le_of_lt hs)]
    exact mul_le_mul_left (le_of_lt hs) H.1

/-! ### Products and rows -/
/-- `Π_{i ∈ l} f i`. -/
def prod {ι : Type v} (f : ι → α) : List ι → α
  | .nil => 1
  | .cons i l => f i * prod f l
theorem prod_nonneg {ι : Type v} {f : ι → α} (l : List ι) (h : ∀ i, 0 ≤ f i) : 0 ≤ prod f l := by
  induction l with
  | nil => exact zero_le_one
  | cons i l ih => exact nonneg_mul (h i) ih
theorem prod_le_all {ι : Type v} {f g : ι → α} (l : List ι) (hf : ∀ i, 0 ≤ f i) (h : AllOf (fun i => f i ≤ g i) l) : prod f l ≤ prod g l := by
  induction l with
  | nil => exact le_refl 1
  | cons i l ih => exact mul_le_mul (hf i) (le_trans (prod_nonneg l hf) (ih h.2)) h.1 (ih h.2)

/-- A dither row: uniform offsets, independent between the channels of the list. -/
structure Row {Ω : Type v} {κ : Type w} (L : Law α Ω) (n : Nat) (chans : List κ) (u : κ → Ω → α) : Prop where
  unif : AllOf (fun j => Uniform L n (u j)) chans
  indep : ∀ f : κ → α → α, L.E (fun o => prod (fun j => f j (u j o)) chans) = prod (fun j => L.E (fun o => f j (u j o))) chans
/-- The row is independent of the history `ξ`: of everything the key, the scales and the query are computed from. -/
def Fresh {Ω : Type v} {κ : Type w} {Θ : Type x} (L : Law α Ω) (ξ : Ω → Θ) (u : κ → Ω → α) : Prop :=
  ∀ g : Θ → (κ → α) → α, L.E (fun o => g (ξ o) (fun j => u j o)) = L.E (fun o => L.E (fun o' => g (ξ o) (fun j => u j o')))

/-- What a token's radius is made of, given its history: scaled query `q`, key `key`, steps `s` per channel. -/
structure Token (α : Type u) (κ : Type w) (Θ : Type x) where
  q : Θ → κ → α
  key : Θ → κ → α
  s : Θ → κ → α
  c : Θ → α
namespace Token
variable {κ : Type w} {Θ : Type x} (T : Token α κ Θ) (chans : List κ) (n : Nat) (θ : Θ)
/-- Logit error `Σ_j q_j r_j` for the offsets `v`. -/
def err (rd : α → α) (v : κ → α) : α := sum (fun j => T.q θ j * residual rd (T.s θ j) (T.key θ j) (v j)) chans
/-- Deterministic term `Σ ½ s |q|`. -/
def det : α := sum (fun j => abs (T.q θ j) * (T.s θ j / 2)) chans
/-- Bias term `Σ |q| s h`. -/
def bias : α := sum (fun j => abs (T.q θ j) * (T.s θ j * halfStep n)) chans
/-- Proxy `σ² = Σ q² s² (1 - 4⁻ⁿ)/12`. -/
def var : α := sum (fun j => T.q θ j * T.s θ j * (T.q θ j * T.s θ j) * proxy n (halfStep n)) chans
/-- The radius is the deterministic term, or `t + bias` with `t² ≥ 2ℓσ²` — at least the smaller of the two. -/
structure Valid (ell : α) : Prop where
  step : ∀ j, Step (T.s θ j) (T.key θ j)
  radius : T.det chans θ ≤ T.c θ ∨ ∃ t, 0 ≤ t ∧ 0 < T.var chans n θ ∧ 2 * T.var chans n θ * ell ≤ t * t ∧ t + T.bias chans n θ ≤ T.c θ
end Token
end

variable {α : Type u} [ExpField α] {Ω : Type v} {κ : Type w} {Θ : Type x} (L : Law α Ω)

/-- **Sub-Gaussian residual.** `E e^{λ(r - E r)} ≤ e^{λ² s² proxy/2}`, `proxy = (1 - 4⁻ⁿ)/12`.

Code: `witcert_core.cache.radii.radius_dither`.
`python: mean(exp_down(lam * (x - mean(residual_values(y, step, n)))) for x in residual_values(y, step, n)) <= exp_up(lam ** 2 * step ** 2 * proxy(n) / 2)` -/
theorem residual_mgf {n : Nat} {u : Ω → α} (hu : Uniform L n u) {rd : α → α} (hrd : Nearest rd) {s x : α} (hs : Step s x) (lam : α) :
    L.E (fun ω => exp (lam * (residual rd s x (u ω) - L.E (fun ω => residual rd s x (u ω))))) ≤ exp (2⁻¹ * (lam * lam * (s * s * proxy n (halfStep n)))) := by
  cases hs with
  | inr hz =>
    have e0 : L.E (fun ω => residual rd s x (u ω)) = 0 := (L.congr (g := fun _ => 0) (fun ω => residual_zero rd hz (u ω))).trans (L.const 0)
    rw [e0, L.congr (g := fun _ => exp 0) (fun ω => by rw [residual_zero rd hz (u ω)]; exact congrArg exp (by ring)), L.const, hz.1]
    exact le_of_eq (congrArg exp (by ring))
  | inl hs => cases residual_law L hu hrd hs x with
  | intro o H =>
    have e := H.2 (fun y => y)
    rw [residual_mean] at e
    rw [e, H.2 (fun r => exp (lam * (r - s * o)))]
    refine le_trans (le_of_eq (Law.congr _ (g := fun y => exp (-(lam * s) * y + 0)) (fun y => congrArg exp (by ring)))) ?_
    exact le_trans (dither_mgf n (halfStep n) (-(lam * s)) 0) (le_of_eq (congrArg exp (by ring)))

theorem exp_sum_eq_prod {ι : Type w} (f : ι → α) (l : List ι) : exp (sum f l) = prod (fun i => exp (f i)) l := by
  induction l with
  | nil => exact exp_zero
  | cons i l ih =>
    show exp (f i + sum f l) = exp (f i) * prod (fun i => exp (f i)) l
    rw [exp_add, ih]

/-- **Channel product.** The centred logit error of one token, `X = Σ_j q_j (r_j - E r_j)`, is sub-Gaussian with proxy
`Σ q_j² s_j² (1 - 4⁻ⁿ)/12`; only independence between the channels of one row is used.

Code: `witcert_core.cache.radii.radius_dither` (`σ²`).
`python: dither.mgf([dither.centred(o) for o in dither.space.outcomes]) <= exp_up(dither.lam ** 2 * dither.sigma_sq() / 2)` -/
theorem channels_mgf {n : Nat} {chans : List κ} {u : κ → Ω → α} (hrow : Row L n chans u) {rd : α → α} (hrd : Nearest rd)
    (q s key : κ → α) (hs : ∀ j, Step (s j) (key j)) (lam : α) :
    L.E (fun ω => exp (lam * sum (fun j => q j * (residual rd (s j) (key j) (u j ω) - L.E (fun ω => residual rd (s j) (key j) (u j ω)))) chans))
      ≤ exp (2⁻¹ * (lam * lam * sum (fun j => q j * s j * (q j * s j) * proxy n (halfStep n)) chans)) := by
  have e1 : ∀ ω, exp (lam * sum (fun j => q j * (residual rd (s j) (key j) (u j ω) - L.E (fun ω => residual rd (s j) (key j) (u j ω)))) chans)
      = prod (fun j => (fun j v => exp (lam * q j * (residual rd (s j) (key j) v - L.E (fun ω => residual rd (s j) (key j) (u j ω))))) j (u j ω)) chans := fun ω => by
    rw [← sum_mul, exp_sum_eq_prod]
    exact congr (congrArg prod (funext (fun j => congrArg exp (by ring)))) rfl
  refine le_trans (le_of_eq ((L.congr e1).trans (hrow.indep (fun j v => exp (lam * q j * (residual rd (s j) (key j) v - L.E (fun ω => residual rd (s j) (key j) (u j ω)))))))) ?_
  have e2 : exp (2⁻¹ * (lam * lam * sum (fun j => q j * s j * (q j * s j) * proxy n (halfStep n)) chans))
      = prod (fun j => exp (2⁻¹ * (lam * q j * (lam * q j) * (s j * s j * proxy n (halfStep n))))) chans := by
    rw [← exp_sum_eq_prod]
    refine congrArg exp ?_
    rw [sum_congr chans (f := fun j => 2⁻¹ * (lam * q j * (lam * q j) * (s j * s j * proxy n (halfStep n))))
      (g := fun j => 2⁻¹ * (lam * lam) * (q j * s j * (q j * s j) * proxy n (halfStep n))) (fun j => by ring), sum_mul]
    ring
  rw [e2]
  refine prod_le_all chans (fun j => le_trans (le_of_eq (L.const 0).symm) (L.mono (fun ω => exp_nonneg _))) ?_
  exact AllOf.imp chans (fun j hj => residual_mgf L hj hrd (hs j) (lam * q j)) hrow.unif

/-- One token with a fixed history. -/
theorem token_fixed {n : Nat} {chans : List κ} {u : κ → Ω → α} (hrow : Row L n chans u) {rd : α → α} (hrd : Nearest rd)
    (T : Token α κ Θ) (θ : Θ) {ell : α} (hT : T.Valid chans n θ ell) :
    L.P (fun ω => Law.gtB (T.c θ) (abs (T.err chans θ rd (fun j => u j ω)))) ≤ 2 * exp (-ell) := by
  have hpos : (0 : α) ≤ 2 * exp (-ell) := nonneg_mul zero_le_two (exp_nonneg _)
  cases hT.radius with
  | inl hd =>
    refine le_trans (le_of_eq (L.P_gt_zero (fun ω => le_trans ?_ hd))) hpos
    refine le_trans (abs_sum_le _ chans) (sum_le chans (fun j => ?_))
    rw [abs_mul]
    exact mul_le_mul_left (abs_nonneg _) (residual_le hrd (hT.step j) _)
  | inr ht => cases ht with
    | intro t ht =>
      refine le_trans (L.P_mono (fun ω hω => ?_)) (L.chernoff_abs _ ht.2.1 ht.1 ht.2.2.1 (channels_mgf L hrow hrd (T.q θ) (T.s θ) (T.key θ) hT.step))
      -- |err| > c ≥ t + bias gives |X| ≥ t
      have eX : sum (fun j => T.q θ j * (residual rd (T.s θ j) (T.key θ j) (u j ω) - L.E (fun ω => residual rd (T.s θ j) (T.key θ j) (u j ω)))) chans
          = T.err chans θ rd (fun j => u j ω) - sum (fun j => T.q θ j * L.E (fun ω => residual rd (T.s θ j) (T.key θ j) (u j ω))) chans := by
        show _ = sum _ chans - _
        rw [← sum_sub]
        exact sum_congr chans (fun j => by ring)
      have hβ : abs (sum (fun j => T.q θ j * L.E (fun ω => residual rd (T.s θ j) (T.key θ j) (u j ω))) chans) ≤ T.bias chans n θ := by
        refine le_trans (abs_sum_le _ chans) (sum_le_all chans (AllOf.imp chans (fun j hj => ?_) hrow.unif))
        rw [abs_mul]
        exact mul_le_mul_left (abs_nonneg _) (residual_bias L hj hrd (hT.step j))
      cases Law.gt_cases (T.c θ) (abs (T.err chans θ rd (fun j => u j ω))) with
      | inl k => exact absurd (k.2.symm.trans hω) (fun e => Bool.noConfusion e)
      | inr k =>
        cases Law.ge_cases t (abs (sum (fun j => T.q θ j * (residual rd (T.s θ j) (T.key θ j) (u j ω) - L.E (fun ω => residual rd (T.s θ j) (T.key θ j) (u j ω)))) chans)) with
        | inl m => exact m.2
        | inr m =>
          exfalso
          have tri := abs_add (sum (fun j => T.q θ j * (residual rd (T.s θ j) (T.key θ j) (u j ω) - L.E (fun ω => residual rd (T.s θ j) (T.key θ j) (u j ω)))) chans)
            (sum (fun j => T.q θ j * L.E (fun ω => residual rd (T.s θ j) (T.key θ j) (u j ω))) chans)
          have e3 : sum (fun j => T.q θ j * (residual rd (T.s θ j) (T.key θ j) (u j ω) - L.E (fun ω => residual rd (T.s θ j) (T.key θ j) (u j ω)))) chans
              + sum (fun j => T.q θ j * L.E (fun ω => residual rd (T.s θ j) (T.key θ j) (u j ω))) chans = T.err chans θ rd (fun j => u j ω) := by
            rw [eX]; ring
          rw [e3] at tri
          exact k.1 (le_trans (le_trans tri (add_le_add (le_of_lt m.1) hβ)) ht.2.2.2)

/-- **The radius of the probabilistic tier.** If the row is independent of the token's history, then
`P(|Σ_j q_j r_j| > c) ≤ 2e^{-ℓ}` for `c = min(Σ ½ s|q|, t + Σ|q| s h)`, `t² ≥ 2ℓσ²`. With `ℓ = ln(2S/δ)` this is the
`c_t` of the code, bias term included.

Code: `witcert_core.cache.radii.radius_dither`.
`python: dither.prob(lambda o: abs(dither.err(0, o)) > dither.radius(0, dither.ell)) <= 2 * exp_up(-dither.ell) and dither_formula(sqrt_up(2 * log_up(2 * head.S / delta)) * (1 - tiny)) <= code_radius_dither(delta)` -/
theorem tier_d_token {n : Nat} {chans : List κ} {u : κ → Ω → α} (hrow : Row L n chans u) {rd : α → α} (hrd : Nearest rd)
    (T : Token α κ Θ) (ξ : Ω → Θ) (hfresh : Fresh L ξ u) {ell : α} (hT : ∀ θ, T.Valid chans n θ ell) :
    L.P (fun ω => Law.gtB (T.c (ξ ω)) (abs (T.err chans (ξ ω) rd (fun j => u j ω)))) ≤ 2 * exp (-ell) := by
  have e := hfresh (fun θ v => Law.ind (Law.gtB (T.c θ) (abs (T.err chans θ rd v))))
  refine le_trans (le_of_eq e) (le_trans (L.mono (g := fun _ => 2 * exp (-ell)) (fun ω => ?_)) (le_of_eq (L.const _)))
  exact token_fixed L hrow hrd T (ξ ω) (hT (ξ ω))

/-- **One cell of the probabilistic tier.** `S` tokens, each with a row independent of *its own* history; rows and histories of
different tokens may depend on each other in any way. If `2 S e^{-ℓ} ≤ δ` then some token violates its radius with
probability at most `δ`.

Code: `witcert_core.cache.radii.radius_dither` (`ln(2S/δ_loc)`, `num_visible`).
`python: dither.prob(lambda o: dither.violated(o)) <= dither.delta` -/
theorem tier_d_cell {n : Nat} {chans : List κ} {rd : α → α} (hrd : Nearest rd) {ι : Type w} (tokens : List ι)
    (u : ι → κ → Ω → α) (T : ι → Token α κ Θ) (ξ : ι → Ω → Θ) {ell δ : α}
    (hrow : ∀ i, Row L n chans (u i)) (hfresh : ∀ i, Fresh L (ξ i) (u i)) (hT : ∀ i θ, (T i).Valid chans n θ ell)
    (hδ : sum (fun _ => (1 : α)) tokens * (2 * exp (-ell)) ≤ δ) :
    L.P (anyOf (fun i ω => Law.gtB ((T i).c (ξ i ω)) (abs ((T i).err chans (ξ i ω) rd (fun j => u i j ω)))) tokens) ≤ δ := by
  refine le_trans (L.union_budget _ (fun _ => 2 * exp (-ell)) tokens (fun i => tier_d_token L (hrow i) hrd (T i) (ξ i) (hfresh i) (hT i))) ?_
  rw [sum_const_mul]
  exact le_trans (le_of_eq (mul_comm _ _)) hδ
end WitCert
