import WitCert.Attention.Output
/-!
# The visible set

Both distributions of a cell are over the same tokens: those the engine attends. Tokens outside both sums do not matter,
whatever their radius (`unseen_tokens`). A token that one side sees and the other does not is no matter of a radius at all:
it costs its whole weight (`window_mass`), and no radius of the others says so.
-/
set_option synthInstance.maxSize 4000
universe u v w
namespace WitCert
variable {α : Type u} [OrderedField α] {ι : Type v} {κ : Type w}

/-- The tokens of a list that are seen. -/
def keep (seen : ι → Bool) : List ι → List ι
  | .nil => .nil
  | .cons t l => cond (seen t) (.cons t (keep seen l)) (keep seen l)
theorem sum_keep_cond (seen : ι → Bool) (f : ι → α) (l : List ι) : sum f (keep seen l) = sum (fun t => cond (seen t) (f t) 0) l := by
  induction l with
  | nil => rfl
  | cons t l ih =>
    show sum f (cond (seen t) (.cons t (keep seen l)) (keep seen l)) = cond (seen t) (f t) 0 + sum (fun t => cond (seen t) (f t) 0) l
    rw [← ih]
    cases seen t with
    | true => rfl
    | false => show sum f (keep seen l) = 0 + sum f (keep seen l); ring
theorem sum_keep (seen : ι → Bool) {f : ι → α} (l : List ι) (h : ∀ t, seen t = false → f t = 0) : sum f (keep seen l) = sum f l := by
  rw [sum_keep_cond]
  refine sum_congr l (fun t => ?_)
  have h0 := h t
  cases e : seen t with
  | true => rfl
  | false => exact (h0 e).symm

/-- A cell with the tokens left out that are not seen. -/
def Cell.visible (x : Cell α ι) (seen : ι → Bool) : Cell α ι := ⟨keep seen x.l, x.w, x.r, x.a⟩

theorem Cell.visible_mean (x : Cell α ι) (seen : ι → Bool) (h0 : ∀ t, seen t = false → x.w t = 0) (f : ι → α) :
    (x.visible seen).mean f = x.mean f :=
  sum_keep seen x.l (fun t e => by
    show x.w t * f t = 0
    rw [h0 t e]; ring)

/-- **Tokens outside both sums do not matter.** With weight 0 on the tokens that are not seen, a cell is sound without them,
and its exact weights, its sums and its `TV` are the same, whatever radius these tokens had.

Code: `witcert_core.meter.cells.sum_terms` (logit -inf), `witcert_core.meter.batching.RowBatch`.
`python: padded.TV == TV and padded.A == A and padded.Q == Q and padded.p[: cell.S] == cell.p` -/
theorem Cell.Sound.unseen_tokens {x : Cell α ι} (h : x.Sound) (seen : ι → Bool) (h0 : ∀ t, seen t = false → x.w t = 0) :
    (x.visible seen).Sound ∧ (∀ t, (x.visible seen).p t = x.p t) ∧ (x.visible seen).A = x.A ∧ (x.visible seen).Q = x.Q ∧
      (x.visible seen).TV = x.TV := by
  have m := x.visible_mean seen h0
  have ep : ∀ t, (x.visible seen).p t = x.p t := fun t => by
    show x.w t * x.a t / (x.visible seen).Z = x.w t * x.a t / x.Z
    rw [show (x.visible seen).Z = x.Z from m x.a]
  refine ⟨⟨h.w_nonneg, (sum_keep seen x.l h0).trans h.w_sum, h.one_le_r, h.lower, h.upper⟩, ep, m x.r,
    m (fun t => (x.r t - 1) * (x.r t - 1)), ?_⟩
  show sum (fun t => abs ((x.visible seen).p t - x.w t)) (keep seen x.l) / 2 = sum (fun t => abs (x.p t - x.w t)) x.l / 2
  refine congrArg (· / 2) ((sum_congr _ (fun t => by rw [ep t])).trans (sum_keep seen x.l (fun t e => ?_)))
  rw [x.p_eq, h0 t e, show x.u * (0 * x.a t) - 0 = 0 from by ring]
  exact abs_of_nonneg (le_refl 0)

/-- The weights of an engine that attends only some of the tokens. -/
def inWindow (seen : ι → Bool) (w : ι → α) (l : List ι) (t : ι) : α := cond (seen t) (w t) 0 / sum w (keep seen l)

/-- **A window that the engine does not attend.** If the engine leaves out tokens that the meter counts (or the reverse), the
`TV` between the two is exactly the weight of these tokens, whatever the radii.

Code: `witcert_core.meter.measure.measure_rows` (`window_left`).
`python: tv([x / (1 - head.cell.w[0]) if t else Fraction(0) for t, x in enumerate(head.cell.w)], head.cell.w) == head.cell.w[0]` -/
theorem window_mass {w : ι → α} {l : List ι} (seen : ι → Bool) (hw : ∀ t, 0 ≤ w t) (hs : sum w l = 1) (hM : 0 < sum w (keep seen l)) :
    tv (inWindow seen w l) w l = 1 - sum w (keep seen l) := by
  have e0 : sum w (keep seen l) = sum (fun t => cond (seen t) (w t) 0) l := sum_keep_cond seen w l
  have c0 : ∀ t, 0 ≤ cond (seen t) (w t) 0 := fun t => by
    cases seen t with
    | true => exact hw t
    | false => exact le_refl 0
  have c1 : ∀ t, cond (seen t) (w t) 0 ≤ w t := fun t => by
    cases seen t with
    | true => exact le_refl _
    | false => exact hw t
  have hM1 : sum w (keep seen l) ≤ 1 := by
    rw [e0, ← hs]
    exact sum_le l c1
  have hi := inv_nonneg hM
  have h1 : 0 ≤ (sum w (keep seen l))⁻¹ - 1 :=
    le_cert (nonneg_mul hi (sub_nonneg hM1)) (eq_lin (mul_inv_cancel hM) 1 (by ring))
  have e1 : ∀ t, abs (inWindow seen w l t - w t)
      = ((sum w (keep seen l))⁻¹ - 1) * cond (seen t) (w t) 0 + 1 * (w t - cond (seen t) (w t) 0) := fun t => by
    show abs (cond (seen t) (w t) 0 / sum w (keep seen l) - w t) = _
    cases seen t with
    | true =>
      show abs (w t / sum w (keep seen l) - w t) = ((sum w (keep seen l))⁻¹ - 1) * w t + 1 * (w t - w t)
      rw [show w t / sum w (keep seen l) - w t = ((sum w (keep seen l))⁻¹ - 1) * w t from by ring, abs_of_nonneg (nonneg_mul h1 (hw t))]
      ring
    | false =>
      show abs (0 / sum w (keep seen l) - w t) = ((sum w (keep seen l))⁻¹ - 1) * 0 + 1 * (w t - 0)
      rw [show 0 / sum w (keep seen l) - w t = -(w t) from by ring, abs_neg, abs_of_nonneg (hw t)]
      ring
  show sum (fun t => abs (inWindow seen w l t - w t)) l / 2 = _
  rw [sum_congr l e1, sum_lin2, sum_sub, ← e0, hs]
  exact (eq_div zero_lt_two (eq_lin (mul_inv_cancel hM) (-1) (by ring))).symm
end WitCert
