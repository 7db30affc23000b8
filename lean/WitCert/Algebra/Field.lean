/-!
# Linearly ordered fields

The whole development speaks about an arbitrary linearly ordered field `α`: the reals of the meter, and the
rationals of `WitCert.Examples.Rational`, which show that the class is inhabited. Nothing but core Lean is used.
-/
universe u

namespace WitCert

/-- A linearly ordered field with a decidable order. `a⁻¹` matters only for `a ≠ 0`. -/
class OrderedField (α : Type u) extends Add α, Mul α, Neg α, Sub α, Inv α, Div α, LE α where
  zero : α
  one : α
  add_assoc : ∀ a b c : α, a + b + c = a + (b + c)
  add_comm : ∀ a b : α, a + b = b + a
  add_zero : ∀ a : α, a + zero = a
  add_neg : ∀ a : α, a + -a = zero
  sub_eq : ∀ a b : α, a - b = a + -b
  mul_assoc : ∀ a b c : α, a * b * c = a * (b * c)
  mul_comm : ∀ a b : α, a * b = b * a
  mul_one : ∀ a : α, a * one = a
  mul_add : ∀ a b c : α, a * (b + c) = a * b + a * c
  mul_inv : ∀ a : α, a ≠ zero → a * a⁻¹ = one
  div_eq : ∀ a b : α, a / b = a * b⁻¹
  zero_ne_one : zero ≠ one
  le_refl : ∀ a : α, a ≤ a
  le_trans : ∀ {a b c : α}, a ≤ b → b ≤ c → a ≤ c
  le_antisymm : ∀ {a b : α}, a ≤ b → b ≤ a → a = b
  le_total : ∀ a b : α, a ≤ b ∨ b ≤ a
  add_le_add_left : ∀ {a b : α} (c : α), a ≤ b → c + a ≤ c + b
  mul_nonneg : ∀ {a b : α}, zero ≤ a → zero ≤ b → zero ≤ a * b
  decLe : ∀ a b : α, Decidable (a ≤ b)

export OrderedField (add_assoc add_comm add_zero add_neg sub_eq mul_assoc mul_comm mul_one mul_add mul_inv div_eq
  zero_ne_one le_refl le_trans le_antisymm le_total add_le_add_left)

section
variable {α : Type u} [OrderedField α]
open OrderedField (zero one)

/-- The image of a natural number: `0 ↦ zero`, `1 ↦ one`, `n + 2 ↦ ofNat (n + 1) + one`. -/
def ofNat : Nat → α
  | .zero => zero
  | .succ .zero => one
  | .succ (.succ n) => ofNat (.succ n) + one

instance instNumeral (n : Nat) : OfNat α n := ⟨ofNat n⟩
instance instDecidableLe (a b : α) : Decidable (a ≤ b) := OrderedField.decLe a b
/-- The order is linear, so `a < b` is "not `b ≤ a`". -/
instance instLt : LT α := ⟨fun a b => ¬ b ≤ a⟩

theorem zero_add (a : α) : zero + a = a := by rw [add_comm, add_zero]
theorem one_mul (a : α) : one * a = a := by rw [mul_comm, mul_one]
theorem add_left_comm (a b c : α) : a + (b + c) = b + (a + c) := by
  rw [← add_assoc, add_comm a b, add_assoc]
theorem mul_left_comm (a b c : α) : a * (b * c) = b * (a * c) := by
  rw [← mul_assoc, mul_comm a b, mul_assoc]
theorem add_mul (a b c : α) : (a + b) * c = a * c + b * c := by
  rw [mul_comm, mul_add, mul_comm c a, mul_comm c b]
theorem add_left_cancel {a b c : α} (h : a + b = a + c) : b = c := by
  have h' : -a + (a + b) = -a + (a + c) := congrArg (fun x => -a + x) h
  rw [← add_assoc, ← add_assoc, add_comm (-a) a, add_neg, zero_add, zero_add] at h'
  exact h'
theorem mul_zero (a : α) : a * zero = zero := by
  apply add_left_cancel (a := a * (zero : α))
  rw [← mul_add, add_zero, add_zero]
theorem zero_mul (a : α) : zero * a = zero := by rw [mul_comm, mul_zero]
theorem neg_unique {a b : α} (h : a + b = zero) : b = -a :=
  add_left_cancel (a := a) (by rw [h, add_neg])
theorem neg_zero : -(zero : α) = zero := (neg_unique (add_zero zero)).symm
theorem neg_add (a b : α) : -(a + b) = -a + -b :=
  (neg_unique (by
    rw [add_assoc, add_left_comm b, ← add_assoc, add_neg, add_neg, add_zero])).symm
theorem mul_neg (a b : α) : a * -b = -(a * b) :=
  neg_unique (by rw [← mul_add, add_neg, mul_zero])
theorem neg_mul (a b : α) : -a * b = -(a * b) := by rw [mul_comm, mul_neg, mul_comm]
theorem neg_neg (a : α) : - -a = a :=
  (neg_unique (by rw [add_comm, add_neg])).symm
theorem sub_self (a : α) : a - a = zero := by rw [sub_eq, add_neg]
theorem eq_of_sub_eq_zero {a b : α} (h : a - b = zero) : a = b := by
  rw [sub_eq, add_comm] at h
  have h2 := neg_unique h
  rw [neg_neg] at h2
  exact h2

theorem ofNat_succ (n : Nat) : (ofNat (Nat.succ n) : α) = ofNat n + one := by
  cases n with
  | zero => exact (zero_add one).symm
  | succ n => rfl
theorem ofNat_add (m n : Nat) : (ofNat (m + n) : α) = ofNat m + ofNat n := by
  induction n with
  | zero => exact (add_zero (ofNat m)).symm
  | succ n ih => rw [Nat.add_succ, ofNat_succ, ofNat_succ, ih, add_assoc]
theorem ofNat_mul (m n : Nat) : (ofNat (m * n) : α) = ofNat m * ofNat n := by
  induction n with
  | zero => exact (mul_zero (ofNat m)).symm
  | succ n ih => rw [Nat.mul_succ, ofNat_add, ih, ofNat_succ, mul_add, mul_one]
end
end WitCert
