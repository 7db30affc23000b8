import WitCert.Algebra.Sum
/-!
# Blocked accumulation

A blocked accumulator multiplies the mass of a block by the block's mean of `e^c`. It equals the per-token sum for
every choice of radii exactly when the weights are constant in the block.
-/
set_option synthInstance.maxSize 4000
universe u v
namespace WitCert
variable {α : Type u} [OrderedField α] {ι : Type v}

/-- Number of tokens, as an element of the field. -/
def card (l : List ι) : α := sum (fun _ => 1) l
/-- Every element of a list occurs in it at least once. -/
theorem card_pos_of_mem (f : ι → ι → α) (hf : ∀ t s, 0 ≤ f t s) (hr : ∀ t, f t t = 1) (l : List ι) : AllOf (fun t => 1 ≤ sum (f t) l) l := by
  induction l with
  | nil => exact True.intro
  | cons i l ih =>
    refine ⟨?_, AllOf.imp l (fun t ht => le_trans ht (le_cert (hf t i) (by show f t i + sum (f t) l - sum (f t) l = _; ring))) ih⟩
    exact le_cert (sum_nonneg l (hf i)) (by show f i i + sum (f i) l - 1 = _; rw [hr i]; ring)

/-- **Blocked equals per-token exactly for constant weights.** `n Σ w e^c = (Σ w)(Σ e^c)` for all radii if and only if
every token of the block has `n w_t = Σ w`. (`same` decides equality of tokens.)

Code: `witcert_core.meter.sums.accumulate_weights` (one `e^c` per token, never one per block).
`python: all(cell.S * sum(x * (2 if s == t else 1) for s, x in enumerate(w)) == sum(w) * (cell.S + 1) for t in range(cell.S)) == (len(set(w)) == 1)` -/
theorem blocked_iff (w : ι → α) (block : List ι) (same : ι → ι → Bool) (hs : ∀ t s, same t s = true → s = t) (hr : ∀ t, same t t = true) :
    (∀ r : ι → α, (∀ t, 1 ≤ r t) → card block * sum (fun t => w t * r t) block = sum w block * sum r block) ↔
      AllOf (fun t => card block * w t = sum w block) block := by
  constructor
  · intro h
    have f0 : ∀ t s, (0 : α) ≤ cond (same t s) 1 0 := fun t s => by
      cases same t s with
      | true => exact zero_le_one
      | false => exact le_refl 0
    have k := card_pos_of_mem (fun t s => cond (same t s) (1 : α) 0) f0 (fun t => by show cond (same t t) (1 : α) 0 = 1; rw [hr t]; rfl) block
    refine AllOf.imp block (fun t ht => ?_) k
    have e := h (fun s => 1 + cond (same t s) 1 0) (fun s => le_cert (f0 t s) (by ring))
    have e1 : sum (fun s => w s * (1 + cond (same t s) 1 0)) block = sum w block + w t * sum (fun s => cond (same t s) (1 : α) 0) block := by
      rw [← sum_mul, ← sum_add]
      refine sum_congr block (fun s => ?_)
      show w s * (1 + cond (same t s) 1 0) = w s + w t * cond (same t s) 1 0
      cases c : same t s with
      | true => rw [hs t s c]; show w t * (1 + 1) = w t + w t * 1; ring
      | false => show w s * (1 + 0) = w s + w t * 0; ring
    have e2 : sum (fun s => 1 + cond (same t s) (1 : α) 0) block = card block + sum (fun s => cond (same t s) (1 : α) 0) block := sum_add _ _ block
    rw [e1, e2] at e
    have hk : 0 < sum (fun s => cond (same t s) (1 : α) 0) block := lt_of_one_le ht
    generalize sum (fun s => cond (same t s) (1 : α) 0) block = k at e hk
    refine le_antisymm (le_of_mul_le hk (le_of_eq ?_)) (le_of_mul_le hk (le_of_eq (Eq.symm ?_)))
    · exact eq_lin e 1 (by ring)
    · exact eq_lin e 1 (by ring)
  · intro h r _
    rw [← sum_mul, ← sum_mul]
    exact sum_congr_all block (AllOf.imp block (fun t ht => by
      show card block * (w t * r t) = sum w block * r t
      rw [← ht]; ring) h)
end WitCert
