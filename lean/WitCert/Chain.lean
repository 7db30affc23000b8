import WitCert.Attention.NeedleCells
import WitCert.Attention.Sweep
import WitCert.Attention.Softmax
import WitCert.Attention.Directional
import WitCert.Attention.Served
import WitCert.Attention.Visible
import WitCert.Probability.Budget
/-!
# The chain, from its first link to its last

The deterministic tier: stored band norms ⟹ `TV(softmax z, softmax z̃) ≤ tanh(M/2)` for the true attention weights, and likewise for every
other form. The probabilistic tier: dithered keys ⟹ `P(some cell has TV above its meter) ≤ δ_req`.
-/
set_option synthInstance.maxSize 4000
universe u v w x
namespace WitCert

/-- **A further error adds to the radius**: `|z̃ - z| ≤ c` and `|ẑ - z̃| ≤ ω` give `|ẑ - z| ≤ c + ω` (the kernel's own
arithmetic, a cast of `P`).

Code: `witcert_core.meter.kernel_error.arithmetic_radius` (fused: `ω` goes into `c`).
`python: abs(z_again[0] - z[0]) <= c[0] + abs(z_again[0] - z_tilde[0])` -/
theorem radius_add {α : Type u} [OrderedField α] {z zt zh c ω : α} (h1 : abs (zt - z) ≤ c) (h2 : abs (zh - zt) ≤ ω) : abs (zh - z) ≤ c + ω := by
  refine le_trans (le_trans (le_of_eq (congrArg abs (show zh - z = (zh - zt) + (zt - z) from by ring))) (abs_add _ _)) ?_
  exact le_trans (add_le_add h2 h1) (le_of_eq (by ring))

variable {α : Type u} [ExpField α]

/-- The total variation of two softmaxes is that of the cell they make. -/
theorem ofLogits_TV {ι : Type v} (i : ι) (l : List ι) (z zt c : ι → α) (hc : ∀ t, abs (zt t - z t) ≤ c t) :
    (ofLogits i l z zt c).TV = tv (softmax z (.cons i l)) (softmax zt (.cons i l)) (.cons i l) := by
  show sum (fun t => abs ((ofLogits i l z zt c).p t - softmax zt (.cons i l) t)) (.cons i l) / 2 = _
  exact congrArg (fun v => v / 2) (sum_congr (.cons i l) (fun t => by rw [ofLogits_p i l z zt c hc t]))

/-- **The deterministic tier, end to end.** Keys `x_t` and what the cache gives back, `y_t`, differ in band `b` by at most `w_t b`; the query
has band norms `n_b`. If `|scale| Σ_b n_b w_{t,b} ≤ M` for every token then
`TV(softmax(scale⟨q,x⟩), softmax(scale⟨q,y⟩)) ≤ tanh(M/2)`.

Code: `witcert_core.cache.radii.radius_witness`, `witcert_core.meter.sums.accumulate`, `witcert_core.meter.bounds.tanh.bound`.
`python: all(abs(x - v) <= b for x, v, b in zip(z_tilde, z, c)) and head.cell.TV <= (head.cell.R - 1) / (head.cell.R + 1) <= head.cell.code("tanh")` -/
theorem tier_w_tanh {ι : Type v} {β : Type w} {κ : Type x} (i : ι) (l : List ι) (bands : List β) (k : β → List κ)
    (q : β → κ → α) (x y : ι → β → κ → α) (n : β → α) (w : ι → β → α) (scale M : α)
    (hn : ∀ b, NormLe (k b) (q b) (n b)) (hw : ∀ t b, NormLe (k b) (fun j => y t b j - x t b j) (w t b))
    (hM : ∀ t, abs scale * sum (fun b => n b * w t b) bands ≤ M) :
    tv (softmax (fun t => scale * sum (fun b => dot (k b) (q b) (x t b)) bands) (.cons i l))
      (softmax (fun t => scale * sum (fun b => dot (k b) (q b) (y t b)) bands) (.cons i l)) (.cons i l) ≤ tanh (2⁻¹ * M) := by
  have hc : ∀ t, abs (scale * sum (fun b => dot (k b) (q b) (y t b)) bands - scale * sum (fun b => dot (k b) (q b) (x t b)) bands)
      ≤ abs scale * sum (fun b => n b * w t b) bands := fun t => witness_radius bands k q (x t) (y t) n (w t) scale hn (hw t)
  have h := ofLogits_sound i l _ _ _ hc
  have b := h.tv_le_tanh (exp M) (fun t => exp_mono (hM t))
  rw [ofLogits_TV i l _ _ _ hc] at b
  refine le_trans b (le_of_eq ?_)
  show (exp M - 1) / (exp M + 1) = (exp (2 * (2⁻¹ * M)) - 1) / (exp (2 * (2⁻¹ * M)) + 1)
  rw [show 2 * (2⁻¹ * M) = M from eq_lin two_half M (by ring)]

/-- **Any form, end to end.** Whatever bounds the `TV` of every sound cell with these weights and radii bounds the total
variation of the two softmaxes: `jensen`, `needle`, `extremal` apply to the true attention weights.

Code: `witcert_core.meter.bounds.meter`.
`python: TV <= min(1, code("tanh"), code("jensen"), code("needle")) == code("meter")` -/
theorem any_form {ι : Type v} (i : ι) (l : List ι) (z zt c : ι → α) (hc : ∀ t, abs (zt t - z t) ≤ c t) (B : α)
    (hB : ∀ x : Cell α ι, x.Sound → x.l = .cons i l → (∀ t, x.w t = softmax zt (.cons i l) t) → (∀ t, x.r t = exp (c t)) → x.TV ≤ B) :
    tv (softmax z (.cons i l)) (softmax zt (.cons i l)) (.cons i l) ≤ B := by
  rw [← ofLogits_TV i l z zt c hc]
  exact hB _ (ofLogits_sound i l z zt c hc) rfl (fun _ => rfl) (fun _ => rfl)

/-- **The meter is a bound**: the smallest of 1 and any of the forms.

Code: `witcert_core.meter.bounds.meter`.
`python: TV <= min(1, code("tanh"), code("jensen"), code("needle")) and TV <= min(1, code("extremal"))` -/
theorem meter_sound {ι : Type v} {x : Cell α ι} (h : x.Sound) {t j n : α} (ht : x.TV ≤ t) (hj : x.TV ≤ j) (hn : x.TV ≤ n) :
    x.TV ≤ min 1 (min t (min j n)) := le_min h.tv_le_one (le_min ht (le_min hj hn))

/-- **The served output, end to end.** Logits `z` exact and `zt` compressed, with valid radii; the kernel casts the weights,
`|e_t| ≤ u`, and divides by the sum of the uncast ones. Whatever bounds `‖o - Σ ŵ ṽ‖` for every sound cell with the
normalised cast weights and the radii `e^c/(1 - u)`, what is served is within `X + u/(1 - u)·‖õ‖` of exact attention: the
term of the lost mass stands beside every form of the output bound.

Code: `witcert_core.meter.output.output_bound`, `witcert_core.meter.kernel_error.output_error`.
`python: norm_sq(sub(exact_output, average(served_relative, values))) <= (sqrt_up(norm_sq(sub(exact_output, average(share(served_relative), values)))) + cast_unit / (1 - cast_unit) * sqrt_up(norm_sq(average(served_relative, values)))) ** 2` -/
theorem any_output {ι : Type v} {κ : Type w} (i : ι) (l : List ι) (z zt c : ι → α) (hc : ∀ t, abs (zt t - z t) ≤ c t)
    (e : ι → α) {u : α} (he : ∀ t, abs (e t) ≤ u) (hu : u < 1) (k : List κ) (vt ve : ι → κ → α) {X N : α}
    (hX : ∀ y : Cell α ι, y.Sound → y.l = .cons i l →
      (∀ t, y.w t = share (fun t => softmax zt (.cons i l) t * (1 + e t)) (.cons i l) t) → (∀ t, y.r t = exp (c t) / (1 - u)) →
      NormLe k (fun j => sum (fun t => y.p t * ve t j) y.l - sum (fun t => y.w t * vt t j) y.l) X)
    (hN : NormLe k (fun j => sum (fun t => softmax zt (.cons i l) t * (1 + e t) * vt t j) (.cons i l)) N) :
    NormLe k (fun j => sum (fun t => softmax z (.cons i l) t * ve t j) (.cons i l)
      - sum (fun t => softmax zt (.cons i l) t * (1 + e t) * vt t j) (.cons i l)) (X + u / (1 - u) * N) := by
  have h := ofLogits_sound i l z zt c hc
  refine (h.output_served he hu k vt ve (hX _ (h.cast_sound he hu) rfl (fun _ => rfl) (fun _ => rfl)) hN).congr (fun j => ?_)
  show _ = sum (fun t => (ofLogits i l z zt c).p t * ve t j) (.cons i l) - _
  rw [sum_congr (.cons i l) (f := fun t => (ofLogits i l z zt c).p t * ve t j) (g := fun t => softmax z (.cons i l) t * ve t j)
    (fun t => by rw [ofLogits_p i l z zt c hc t])]
  exact rfl

/-- **The output handed on, with every term.** The sums are about the weights `w` of the stored keys, computed again; the engine
served `s ≥ 0` with `|s_t - w_t| ≤ u w_t + b_t`, so `θ = u + Σ b`; its sum over the values is off by at most `σ`, and channels are
rounded. With any output bound `X ≥ ‖o - Σ w ṽ‖`, the diameter `D` and `B = min(‖Σ w ṽ‖ + θ D, max ‖ṽ‖)`,
`‖o - õ‖ ≤ X + θ D + θ B + σ + υ((1 + θ) B + σ) + R λ`.

Code: `witcert_core.meter.cells.bounds_of`, `witcert_core.meter.kernel_error.output_error`.
`python: norm_sq(sub(exact_output, rounded(average(served, values)))) <= (code_output + code_kernel_error) ** 2` -/
theorem served_output {ι : Type v} {κ : Type w} (i : ι) (l : List ι) (z zt c : ι → α) (hc : ∀ t, abs (zt t - z t) ≤ c t)
    (s b : ι → α) {u θ : α} (hs0 : ∀ t, 0 ≤ s t) (hs : ∀ t, abs (s t - softmax zt (.cons i l) t) ≤ u * softmax zt (.cons i l) t + b t)
    (hu : u + sum b (.cons i l) ≤ θ) (hθ : θ < 1) (k : List κ) (vt ve : ι → κ → α) {D n V σ υ lam R X : α} (f y : κ → α)
    (hX : NormLe k (fun j => sum (fun t => softmax z (.cons i l) t * ve t j) (.cons i l) - sum (fun t => softmax zt (.cons i l) t * vt t j) (.cons i l)) X)
    (hD0 : 0 ≤ D) (hD : ∀ s t, NormLe k (fun j => vt s j - vt t j) D)
    (hn : NormLe k (fun j => sum (fun t => softmax zt (.cons i l) t * vt t j) (.cons i l)) n) (hV : ∀ t, NormLe k (vt t) V)
    (hf : NormLe k f σ) (hυ : 0 ≤ υ) (hlam : 0 ≤ lam) (hR : 0 ≤ R) (hk : sum (fun _ => (1 : α)) k ≤ R * R)
    (hy : ∀ j, abs (y j - (sum (fun t => s t * vt t j) (.cons i l) + f j)) ≤ υ * abs (sum (fun t => s t * vt t j) (.cons i l) + f j) + lam) :
    NormLe k (fun j => sum (fun t => softmax z (.cons i l) t * ve t j) (.cons i l) - y j)
      (X + (θ * D + θ * min (n + θ * D) V + σ + υ * ((1 + θ) * min (n + θ * D) V + σ) + R * lam)) := by
  have hw : sum (softmax zt (.cons i l)) (.cons i l) = 1 := (ofLogits_sound i l z zt c hc).w_sum
  have hd' : sum (fun t => abs (s t - softmax zt (.cons i l) t)) (.cons i l) ≤ θ := by
    refine le_trans (sum_le (.cons i l) hs) (le_trans (le_of_eq ?_) hu)
    rw [sum_add, sum_mul, hw]; ring
  have hN : abs (sum s (.cons i l) - 1) ≤ θ := by
    rw [← hw, ← sum_sub]
    exact le_trans (abs_sum_le _ _) hd'
  have hS := sum_pos_of_near hN hθ
  have hE : tv (softmax zt (.cons i l)) (share s (.cons i l)) (.cons i l) ≤ θ := by
    refine le_trans (le_of_eq ?_) (cast_tv hs0 hw hd' hθ)
    exact congrArg (· / 2) (sum_congr _ (fun t => by rw [← abs_neg]; exact congrArg abs (by ring)))
  have sm := served_mean hw hs0 hS hE k vt hD0 hD hn hV
  have ke := kernel_output hN hS k vt sm.1 sm.2 f y hf hυ hlam hR hk hy
  have ke' := (ke.smul (-1)).round_up (σ := θ * D + θ * min (n + θ * D) V + σ + υ * ((1 + θ) * min (n + θ * D) V + σ) + R * lam)
    (le_of_eq (by rw [abs_neg, abs_of_nonneg zero_le_one]; ring))
  exact (hX.add ke').congr (fun j => by ring)

/-- **The proxy of the code**: `proxy(n, 1/2^{n+1}) = (1 - 4⁻ⁿ)/12`.

Code: `witcert_core.cache.radii.radius_dither` (`(1 - 4⁻⁸)/12`).
`python: sum((2 ** i * half_step(n)) ** 2 for i in range(n)) == proxy(n)` -/
theorem proxy_half (n : Nat) : 12 * proxy n (halfStep n) * pow 4 n = (pow 4 n - 1 : α) := by
  have e := proxy_closed (α := α) n (halfStep n)
  have h := halfStep_mul (α := α) n
  have p := pow_two_sq (α := α) n
  -- 4·halfStep²·4ⁿ = (2·halfStep·2ⁿ)² = 1
  have s : 4 * (halfStep n * halfStep n) * pow 4 n = (1 : α) := by
    rw [← p]
    exact eq_lin h (2 * halfStep n * pow 2 n + 1) (by ring)
  exact eq_lin2 e s (4 * pow 4 n) (pow 4 n - 1) (by ring)

/-- **The probabilistic tier, end to end.** `N` cells with `N·δ_loc = δ_req`; in each, `S` visible tokens with `2 S e^{-ℓ} ≤ δ_loc`, every row
fresh for its own token. If a cell's meter is right whenever none of its radii is violated, the probability that some cell
has `TV` above its meter is at most `δ_req`. No independence between tokens, rows or cells is used.

Code: `witcert_core.cache.radii.radius_dither`, `witcert_core.meter.budget.Budget`, `witcert_core.meter.measure.measure`.
`python: budget.num_cells * dither.S * 2 * exp_down(-log_up(2 * dither.S / budget.declared_loc())) <= budget.delta_req` -/
theorem tier_d_request {Ω : Type v} {κ : Type w} {Θ : Type x} (L : Law α Ω) {n : Nat} {chans : List κ} {rd : α → α} (hrd : Nearest rd)
    {γ ι : Type w} (cells : List γ) (tokens : γ → List ι) (u : ι → κ → Ω → α) (T : γ → ι → Token α κ Θ) (ξ : γ → ι → Ω → Θ)
    (TV meter : γ → Ω → α) {ell δ_loc δ_req : α}
    (hrow : ∀ i, Row L n chans (u i)) (hfresh : ∀ g i, Fresh L (ξ g i) (u i)) (hT : ∀ g i θ, (T g i).Valid chans n θ ell)
    (hS : ∀ g, sum (fun _ => (1 : α)) (tokens g) * (2 * exp (-ell)) ≤ δ_loc) (hN : sum (fun _ => (1 : α)) cells * δ_loc = δ_req)
    (hmeter : ∀ g o, anyOf (fun i ω => Law.gtB ((T g i).c (ξ g i ω)) (abs ((T g i).err chans (ξ g i ω) rd (fun j => u i j ω)))) (tokens g) o = false →
      TV g o ≤ meter g o) :
    L.P (anyOf (fun g o => Law.gtB (meter g o) (TV g o)) cells) ≤ δ_req :=
  meter_claim L cells (fun g => anyOf (fun i ω => Law.gtB ((T g i).c (ξ g i ω)) (abs ((T g i).err chans (ξ g i ω) rd (fun j => u i j ω)))) (tokens g))
    TV meter hmeter (budget_declared L _ cells (fun g => tier_d_cell L hrd (tokens g) u (T g) (ξ g) hrow (hfresh g) (hT g) (hS g)) hN)
end WitCert
