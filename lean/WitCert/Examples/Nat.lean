import WitCert.Algebra.Field
/-!
# Natural numbers: the few facts that the rationals need

Only core Lean is used, and the order facts are proved here, so that nothing depends on which lemmas a core library ships.
-/
namespace WitCert.N

theorem add_mul (a b c : Nat) : (a + b) * c = a * c + b * c := by
  rw [Nat.mul_comm, Nat.mul_add, Nat.mul_comm c a, Nat.mul_comm c b]
theorem mul_assoc (a b c : Nat) : a * b * c = a * (b * c) := by
  induction c with
  | zero => rfl
  | succ c ih => rw [Nat.mul_succ, ih, Nat.mul_succ, Nat.mul_add]
theorem mul_left_comm (a b c : Nat) : a * (b * c) = b * (a * c) := by
  rw [← mul_assoc, Nat.mul_comm a b, mul_assoc]

/-- `m ≤ n` is `n = m + k` for some `k`. -/
theorem le_iff {m n : Nat} : m ≤ n ↔ ∃ k, n = m + k := by
  constructor
  · intro h
    induction h with
    | refl => exact ⟨0, rfl⟩
    | step _ ih => cases ih with
      | intro k e => exact ⟨Nat.succ k, congrArg Nat.succ e⟩
  · intro h
    cases h with
    | intro k e =>
      rw [e]
      clear e
      induction k with
      | zero => exact Nat.le.refl
      | succ k ih => exact Nat.le.step ih
theorem add_cancel {a b c : Nat} (h : a + c = b + c) : a = b := by
  induction c with
  | zero => exact h
  | succ c ih => exact ih (congrArg Nat.pred h)
theorem le_total (a b : Nat) : a ≤ b ∨ b ≤ a := by
  induction a with
  | zero => exact Or.inl (Nat.zero_le b)
  | succ a ih => cases ih with
    | inr h => exact Or.inr (Nat.le.step h)
    | inl h => cases (le_iff.mp h) with
      | intro k e => cases k with
        | zero => exact Or.inr (by rw [e]; exact Nat.le.step Nat.le.refl)
        | succ k => exact Or.inl (le_iff.mpr ⟨k, Eq.trans e (Nat.succ_add a k).symm⟩)
theorem add_zero_left {a b : Nat} (h : a + b = 0) : a = 0 := by
  cases b with
  | zero => exact h
  | succ b => exact Nat.noConfusion h
theorem le_antisymm {a b : Nat} (h : a ≤ b) (h' : b ≤ a) : a = b := by
  cases le_iff.mp h with
  | intro k e => cases le_iff.mp h' with
    | intro l f =>
      -- b = a + k, a = b + l, so k + l = 0
      have g : (k + l) + a = 0 + a := by
        rw [Nat.zero_add, Nat.add_comm, ← Nat.add_assoc, ← e]; exact f.symm
      have k0 := add_zero_left (add_cancel g)
      exact (Eq.trans e (congrArg (fun x => a + x) k0)).symm
theorem add_le_add_right {a b : Nat} (c : Nat) (h : a ≤ b) : a + c ≤ b + c := by
  cases le_iff.mp h with
  | intro k e => exact le_iff.mpr ⟨k, by rw [e, Nat.add_assoc, Nat.add_comm k c, ← Nat.add_assoc]⟩
theorem le_of_add_le {a b c : Nat} (h : a + c ≤ b + c) : a ≤ b := by
  cases le_iff.mp h with
  | intro k e =>
    refine le_iff.mpr ⟨k, add_cancel (c := c) ?_⟩
    rw [e, Nat.add_assoc, Nat.add_comm c k, ← Nat.add_assoc]
theorem add_le_add {a b c d : Nat} (h : a ≤ b) (h' : c ≤ d) : a + c ≤ b + d :=
  Nat.le_trans (add_le_add_right c h) (by rw [Nat.add_comm b c, Nat.add_comm b d]; exact add_le_add_right b h')
theorem mul_le_mul_right {a b : Nat} (c : Nat) (h : a ≤ b) : a * c ≤ b * c := by
  cases le_iff.mp h with
  | intro k e => exact le_iff.mpr ⟨k * c, by rw [e, add_mul]⟩
/-- Cancel a positive factor. -/
theorem le_of_mul_le {a b c : Nat} (hc : 0 < c) (h : a * c ≤ b * c) : a ≤ b := by
  cases le_total a b with
  | inl k => exact k
  | inr k => cases le_iff.mp k with
    | intro j e =>
      cases j with
      | zero => rw [e]; exact Nat.le.refl
      | succ j =>
        exfalso
        have e2 : a * c = b * c + (j * c + c) := by rw [e, add_mul, Nat.succ_mul]
        rw [e2] at h
        have h3 : j * c + c ≤ 0 := le_of_add_le (c := b * c) (by rw [Nat.zero_add, Nat.add_comm]; exact h)
        have h4 : c ≤ 0 := Nat.le_trans (le_iff.mpr ⟨j * c, Nat.add_comm _ _⟩) h3
        exact Nat.not_succ_le_zero 0 (Nat.le_trans hc h4)
theorem eq_of_mul_eq {a b c : Nat} (hc : 0 < c) (h : a * c = b * c) : a = b :=
  le_antisymm (le_of_mul_le hc (by rw [h]; exact Nat.le.refl)) (le_of_mul_le hc (by rw [h]; exact Nat.le.refl))
theorem mul_pos {a b : Nat} (ha : 0 < a) (hb : 0 < b) : 0 < a * b := by
  cases a with
  | zero => exact absurd ha (Nat.not_succ_le_zero 0)
  | succ a => rw [Nat.succ_mul]; exact Nat.le_trans hb (le_iff.mpr ⟨a * b, Nat.add_comm _ _⟩)
theorem trichotomy (a b : Nat) : (∃ k, a = b + Nat.succ k) ∨ a = b ∨ (∃ k, b = a + Nat.succ k) := by
  cases le_total a b with
  | inl h => cases le_iff.mp h with
    | intro k e => cases k with
      | zero => exact Or.inr (Or.inl e.symm)
      | succ k => exact Or.inr (Or.inr ⟨k, e⟩)
  | inr h => cases le_iff.mp h with
    | intro k e => cases k with
      | zero => exact Or.inr (Or.inl e)
      | succ k => exact Or.inl ⟨k, e⟩
theorem mul_one (a : Nat) : a * 1 = a := Nat.zero_add a
theorem one_mul (a : Nat) : 1 * a = a := (Nat.mul_comm 1 a).trans (mul_one a)
end WitCert.N
