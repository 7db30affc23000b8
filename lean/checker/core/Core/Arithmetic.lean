prelude
import Core.Rewriting
set_option linter.all false

/-! # Laws of natural numbers that proofs cite from the official core library -/

namespace Nat
theorem add_zero (n : Nat) : n + 0 = n := rfl
theorem add_succ (m n : Nat) : m + succ n = succ (m + n) := rfl
theorem mul_zero (n : Nat) : n * 0 = 0 := rfl
theorem mul_succ (m n : Nat) : m * succ n = m * n + m := rfl

theorem zero_add (n : Nat) : 0 + n = n := by
  induction n with
  | zero => rfl
  | succ n ih => rw [add_succ, ih]
theorem succ_add (m n : Nat) : succ m + n = succ (m + n) := by
  induction n with
  | zero => rfl
  | succ n ih => rw [add_succ, ih, add_succ]
theorem add_comm (m n : Nat) : m + n = n + m := by
  induction n with
  | zero => exact (zero_add m).symm
  | succ n ih => rw [add_succ, ih, succ_add]
theorem add_assoc (a b c : Nat) : a + b + c = a + (b + c) := by
  induction c with
  | zero => rfl
  | succ c ih => rw [add_succ, ih, add_succ, add_succ]
theorem add_left_comm (a b c : Nat) : a + (b + c) = b + (a + c) := by rw [← add_assoc, add_comm a b, add_assoc]

theorem zero_mul (n : Nat) : 0 * n = 0 := by
  induction n with
  | zero => rfl
  | succ n ih => rw [mul_succ, ih]
theorem succ_mul (m n : Nat) : succ m * n = m * n + n := by
  induction n with
  | zero => rfl
  | succ n ih => rw [mul_succ, ih, mul_succ, add_succ, add_succ, add_assoc, add_comm n, add_assoc]
theorem mul_comm (m n : Nat) : m * n = n * m := by
  induction n with
  | zero => exact (zero_mul m).symm
  | succ n ih => rw [mul_succ, ih, succ_mul]
theorem mul_add (a b c : Nat) : a * (b + c) = a * b + a * c := by
  induction c with
  | zero => rfl
  | succ c ih => rw [add_succ, mul_succ, ih, mul_succ, add_assoc]
end Nat
