import WitCert.Probability.TierD
import WitCert.Attention.Cell
/-!
# The budget: from cells to requests, readers and generated text

One event per cell; `δ_loc = δ_req/(L·H·T)`, or a series when the length is unknown; every reader pays for its own cells.
-/
set_option synthInstance.maxSize 4000
universe u v w x
namespace WitCert
variable {α : Type u} [OrderedField α] {Ω : Type v} (L : Law α Ω)

/-- **A declared length.** With `N = L·H·T` cells and `N·δ_loc = δ_req`, cells that each fail with probability at most
`δ_loc` all hold except with probability `δ_req`.

Code: `witcert_core.meter.budget.Budget.delta_loc`.
`python: budget.num_cells * budget.declared_loc() <= budget.delta_req` -/
theorem budget_declared {ι : Type w} (ev : ι → Ω → Bool) (cells : List ι) {δ_loc δ_req : α}
    (h : ∀ i, L.P (ev i) ≤ δ_loc) (hδ : sum (fun _ => (1 : α)) cells * δ_loc = δ_req) : L.P (anyOf ev cells) ≤ δ_req := by
  refine le_trans (L.union_budget ev (fun _ => δ_loc) cells h) (le_of_eq ?_)
  rw [sum_const_mul, ← hδ]
  exact mul_comm _ _

/-- The cells of rows `0, …, T-1`. -/
def rowsUpTo : Nat → List Nat
  | .zero => .nil
  | .succ n => .cons n (rowsUpTo n)
theorem sum_rowsUpTo (f : Nat → α) (n : Nat) : sum f (rowsUpTo n) = rsum n f := by
  induction n with
  | zero => rfl
  | succ n ih =>
    show f n + sum f (rowsUpTo n) = rsum n f + f n
    rw [ih]; ring

/-- **An unknown length.** Any series `a_t ≥ 0` with partial sums at most `ζ` will do: with `δ_t = δ a_t/ζ`, every
number `T` of rows stays within `δ`.

Code: `witcert_core.meter.budget.Budget.delta_loc` (unknown length).
`python: budget.layers * budget.qo_heads * sum(budget.series_loc(t) for t in range(1, 200)) <= budget.delta_req` -/
theorem budget_series (ev : Nat → Ω → Bool) (a : Nat → α) {δ ζ : α} (hδ : 0 ≤ δ) (hζ : 0 < ζ)
    (hsum : ∀ n, rsum n a ≤ ζ) (h : ∀ t, L.P (ev t) ≤ δ * a t / ζ) (T : Nat) : L.P (anyOf ev (rowsUpTo T)) ≤ δ := by
  refine le_trans (L.union_budget ev (fun t => δ * a t / ζ) (rowsUpTo T) h) ?_
  rw [sum_congr (rowsUpTo T) (g := fun t => δ * ζ⁻¹ * a t) (fun t => by ring), sum_mul, sum_rowsUpTo]
  have k := mul_le_mul_left (nonneg_mul hδ (inv_nonneg hζ)) (hsum T)
  exact le_trans k (le_of_eq (eq_lin (mul_inv_cancel hζ) δ (by ring)))

/-- **The series of the code.** `Σ_{t=1}^{T} 1/t² ≤ 5/3` for every `T` (the least constant is `π²/6`, in Mathlib
`hasSum_zeta_two`), so `budget_series` applies to `δ_t ∝ 1/t²`.

Code: `witcert_core.meter.budget.Budget.delta_loc` (`6/(π² t²)`).
`python: sum(Fraction(1, t * t) for t in range(1, 8 * n)) <= Fraction(5, 3)` -/
theorem inverse_squares (n : Nat) : rsum n (fun t => 1 / ((ofNat t + 1) * (ofNat t + 1))) ≤ (5 : α) / 3 := by
  have h3 : (0 : α) < 3 := lt_of_lt_of_le zero_lt_one (le_cert zero_le_two (by ring))
  -- stronger: Σ_{t < n+1} ≤ 5/3 - 2/(2n + 3)
  have key : ∀ n : Nat, rsum (n + 1) (fun t => 1 / ((ofNat t + 1) * (ofNat t + 1))) ≤ (5 : α) / 3 - 2 / (2 * ofNat n + 3) := by
    intro n
    induction n with
    | zero =>
      show (0 : α) + 1 / ((0 + 1) * (0 + 1)) ≤ 5 / 3 - 2 / (2 * 0 + 3)
      have e1 : (1 : α) / ((0 + 1) * (0 + 1)) = 1 := (eq_div (x := (1 : α)) (b := (0 + 1) * (0 + 1)) (lt_cert zero_lt_one (by ring)) (by ring)).symm
      have e2 : (2 : α) * 0 + 3 = 3 := by ring
      rw [e1, e2]
      exact le_of_eq (eq_lin (mul_inv_cancel h3) (-1) (by ring))
    | succ n ih =>
      show rsum (n + 1) (fun t => 1 / ((ofNat t + 1) * (ofNat t + 1))) + 1 / ((ofNat (n + 1) + 1) * (ofNat (n + 1) + 1)) ≤ (5 : α) / 3 - 2 / (2 * ofNat (n + 1) + 3)
      have hn := ofNat_nonneg (α := α) n
      have ep : (ofNat (n + 1) : α) = ofNat n + 1 := ofNat_succ n
      rw [ep]
      generalize (ofNat n : α) = m at hn ih
      have p1 : 0 < 2 * m + 3 := add_pos' (nonneg_mul zero_le_two hn) h3
      have p2 : 0 < 2 * (m + 1) + 3 := add_pos' (nonneg_mul zero_le_two (add_nonneg hn zero_le_one)) h3
      have p3 : 0 < m + 1 + 1 := add_pos' (add_nonneg hn zero_le_one) zero_lt_one
      have step : 1 / ((m + 1 + 1) * (m + 1 + 1)) ≤ 2 / (2 * m + 3) - 2 / (2 * (m + 1) + 3) := by
        refine div_le (mul_pos p3 p3) ?_
        have e : 2 / (2 * m + 3) - 2 / (2 * (m + 1) + 3) = 4 / ((2 * m + 3) * (2 * (m + 1) + 3)) :=
          eq_div (mul_pos p1 p2) (eq_lin2 (mul_inv_cancel p1) (mul_inv_cancel p2) (2 * (2 * (m + 1) + 3)) (-(2 * (2 * m + 3))) (by ring))
        rw [e]
        refine le_trans (le_div (mul_pos p1 p2) (x := 1) (a := 4 * ((m + 1 + 1) * (m + 1 + 1))) ?_) (le_of_eq (by ring))
        exact le_cert zero_le_one (by ring)
      exact le_trans (add_le_add ih step) (le_of_eq (by ring))
  cases n with
  | zero => exact le_div h3 (le_cert (nonneg_cert (add_nonneg zero_le_two (add_nonneg zero_le_two zero_le_one)) (show (5 : α) = 2 + (2 + 1) from by ring)) (show (5 : α) - 0 * 3 = 5 from by ring))
  | succ n =>
    refine le_trans (key n) (le_cert (div_nonneg (a := 2) (b := 2 * ofNat n + 3) zero_le_two (add_pos' (nonneg_mul zero_le_two (ofNat_nonneg n)) h3)) (by ring))

/-- **Every reader pays.** Readers of a shared prefix each have a budget `δ r` for the cells *they* evaluate over all
tokens they see; the probability that some reader is wrong is at most the sum.

Code: `witcert_core.report.ledger.RequestLedger` (one ledger a request, shared prefix included).
`python: 1 - (1 - delta) ** n <= n * delta` -/
theorem every_reader_pays {ρ : Type w} {ι : Type x} (readers : List ρ) (cells : ρ → List ι) (ev : ρ → ι → Ω → Bool) (δ : ρ → α)
    (h : ∀ r, L.P (anyOf (ev r) (cells r)) ≤ δ r) : L.P (anyOf (fun r => anyOf (ev r) (cells r)) readers) ≤ sum δ readers :=
  L.union_budget _ δ readers h

theorem anyOf_imp {ι : Type w} {ev ev' : ι → Ω → Bool} (o : Ω) (h : ∀ i, ev i o = true → ev' i o = true) (l : List ι) :
    anyOf ev l o = true → anyOf ev' l o = true := by
  induction l with
  | nil => exact fun e => e
  | cons i l ih =>
    show or (ev i o) (anyOf ev l o) = true → or (ev' i o) (anyOf ev' l o) = true
    have k := h i
    revert k
    cases ev i o with
    | true => exact fun k _ => by rw [k rfl]; rfl
    | false =>
      intro _
      cases ev' i o with
      | true => exact fun _ => rfl
      | false => exact ih
/-- **From radii to the meter.** If the meter of cell `i` is right whenever no radius of the cell is violated, the
probability that some cell has `TV` above its meter is at most that of a violated radius.

Code: `witcert_core.meter.measure.measure` (a violation is `tv_audit > meter`).
`python: dither.prob(dither.tv_above_meter) <= dither.prob(lambda o: dither.violated(o))` -/
theorem meter_claim {ι : Type w} (cells : List ι) (bad : ι → Ω → Bool) (TV meter : ι → Ω → α)
    (h : ∀ i o, bad i o = false → TV i o ≤ meter i o) {δ : α} (hδ : L.P (anyOf bad cells) ≤ δ) :
    L.P (anyOf (fun i o => Law.gtB (meter i o) (TV i o)) cells) ≤ δ := by
  refine le_trans (L.P_mono (fun o => anyOf_imp o (fun i => ?_) cells)) hδ
  cases e : bad i o with
  | true => exact fun _ => rfl
  | false =>
    intro k
    cases Law.gt_cases (meter i o) (TV i o) with
    | inl m => exact absurd (k.symm.trans m.2) (fun e => Bool.noConfusion e)
    | inr m => exact absurd (h i o e) m.1

/-- **Free generation.** `viol s o` says that the sequence of ids `s` meets a violated cell; `ids o` are the ids that
were emitted with the dither; `s₀` are those of a run without these rows (fixed in advance). Then the probability of a
violation **and** unchanged ids is at most the `δ` of the fixed sequence.

Code: `witcert_core.report.ledger.RequestLedger` (the text of the probabilistic tier claim).
`python: dither.prob(lambda o: dither.violated(o, dither.ids(o)) and dither.ids(o) == 0) <= dither.prob(lambda o: dither.violated(o, 0))` -/
theorem free_generation {S : Type w} (viol : S → Ω → Bool) (ids : Ω → S) (s₀ : S) (same : S → Bool)
    (hsame : ∀ s, same s = true → s = s₀) {δ : α} (h : L.P (viol s₀) ≤ δ) :
    L.P (fun o => and (viol (ids o) o) (same (ids o))) ≤ δ := by
  refine le_trans (L.P_mono (fun o => ?_)) h
  cases e : same (ids o) with
  | true =>
    rw [hsame (ids o) e]
    cases viol s₀ o with
    | true => exact fun _ => rfl
    | false => exact fun k => k
  | false => cases viol (ids o) o with
    | true => exact fun k => Bool.noConfusion k
    | false => exact fun k => Bool.noConfusion k

/-! ### Rows exist: the hypotheses of the probabilistic tier are satisfied by an explicit law -/

/-- Channels `0, …, D-1`, in order. -/
def mapSucc : List Nat → List Nat
  | .nil => .nil
  | .cons j l => .cons (Nat.succ j) (mapSucc l)
def firstChannels : Nat → List Nat
  | .zero => .nil
  | .succ D => .cons 0 (mapSucc (firstChannels D))
def consFun (x : α) (f : Nat → α) : Nat → α
  | .zero => x
  | .succ j => f j
/-- The law of a row of `D` independent offsets. -/
def rowLaw (n : Nat) : Nat → Law α (Nat → α)
  | .zero => Law.dirac (fun _ => 0)
  | .succ D => ((dither n (halfStep n)).pair (rowLaw n D)).map (fun p => consFun p.1 p.2)
theorem prod_mapSucc (f : Nat → α) (l : List Nat) : prod f (mapSucc l) = prod (fun j => f (Nat.succ j)) l := by
  induction l with
  | nil => rfl
  | cons j l ih => exact congrArg (fun v => f (Nat.succ j) * v) ih
theorem allOf_mapSucc {p : Nat → Prop} (l : List Nat) (h : AllOf (fun j => p (Nat.succ j)) l) : AllOf p (mapSucc l) := by
  induction l with
  | nil => exact True.intro
  | cons j l ih => exact ⟨h.1, ih h.2⟩

/-- **Rows exist.** The product of `D` grid laws is a row.

Code: `witcert_core.quantizers.dither.dither_vectors` (what Philox is taken to provide).
`python: mean(u ** 3 * v ** 2 + u * v for u in grid_points(dither.n) for v in grid_points(dither.n)) == mean(u ** 3 for u in grid_points(dither.n)) * mean(v ** 2 for v in grid_points(dither.n)) + mean(u for u in grid_points(dither.n)) ** 2` -/
theorem rowLaw_row (n D : Nat) : Row (rowLaw (α := α) n D) n (firstChannels D) (fun j o => o j) := by
  induction D with
  | zero => exact ⟨True.intro, fun f => rfl⟩
  | succ D ih =>
    constructor
    · refine ⟨fun f => (dither n (halfStep n)).congr (fun y => (rowLaw n D).const (f y)), ?_⟩
      exact allOf_mapSucc _ (AllOf.imp _ (fun j hj f => by
        show (dither n (halfStep n)).E (fun _ => (rowLaw n D).E (fun v => f (v j))) = _
        exact ((dither n (halfStep n)).const _).trans (hj f)) ih.unif)
    · intro f
      show (dither n (halfStep n)).E (fun y => (rowLaw n D).E (fun v => f 0 y * prod (fun j => f j (consFun y v j)) (mapSucc (firstChannels D))))
        = (dither n (halfStep n)).E (fun y => (rowLaw n D).E (fun _ => f 0 y)) * prod (fun j => (dither n (halfStep n)).E (fun y => (rowLaw n D).E (fun v => f j (consFun y v j)))) (mapSucc (firstChannels D))
      have e1 : ∀ y, (rowLaw n D).E (fun v => f 0 y * prod (fun j => f j (consFun y v j)) (mapSucc (firstChannels D)))
          = prod (fun j => (rowLaw n D).E (fun v => f (Nat.succ j) (v j))) (firstChannels D) * f 0 y := fun y => by
        rw [Law.smul, mul_comm]
        refine mul_congr (Eq.trans ((rowLaw n D).congr (fun v => prod_mapSucc _ _)) (ih.indep (fun j => f (Nat.succ j)))) rfl
      rw [(dither n (halfStep n)).congr e1, Law.smul, prod_mapSucc, mul_comm]
      refine mul_congr ((dither n (halfStep n)).congr (fun y => ((rowLaw n D).const _).symm)) ?_
      exact congr (congrArg prod (funext (fun j => ((dither n (halfStep n)).const _).symm))) rfl

/-- **Fresh rows exist.** A row drawn after, and apart from, the history is independent of it.

Code: `witcert_core.quantizers.dither.DitherKey` (a new pass id for every forward pass).
`python: code_row(n) != code_row(n + 1) and code_row(n) == code_row(n)` -/
theorem fresh_of_pair {Θ : Type w} {κ : Type x} {Ψ : Type v} (H : Law α Θ) (K : Law α Ψ) (u : κ → Ψ → α) :
    Fresh (H.pair K) (fun o => o.1) (fun j o => u j o.2) := fun g => by
  show H.E (fun θ => K.E (fun ψ => g θ (fun j => u j ψ))) = H.E (fun θ => K.E (fun _ => H.E (fun _ => K.E (fun ψ => g θ (fun j => u j ψ)))))
  exact H.congr (fun θ => ((K.const _).trans (H.const _)).symm)
end WitCert
