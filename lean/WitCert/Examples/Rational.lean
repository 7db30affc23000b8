import WitCert.Algebra.Order
import WitCert.Examples.Nat
/-!
# The rationals: an ordered field that exists

`Q` is the quotient of the fractions `(p - n)/d` (naturals, `d > 0`) by equality of cross products. It is an
`OrderedField`, so no theorem of this library speaks about nothing; and it computes, so `decide` settles the explicit
counter-examples of `WitCert.Examples.Refuted`.
-/
set_option linter.unusedSimpArgs false
namespace WitCert

/-- The fraction `(p - n)/d`. -/
structure Frac where
  p : Nat
  n : Nat
  d : Nat
  pos : 0 < d
namespace Frac
/-- `a = b` as numbers. -/
def Same (a b : Frac) : Prop := a.p * b.d + b.n * a.d = b.p * a.d + a.n * b.d
/-- `a ≤ b` as numbers. -/
def leB (a b : Frac) : Bool := Nat.ble (a.p * b.d + b.n * a.d) (b.p * a.d + a.n * b.d)
def add (a b : Frac) : Frac := ⟨a.p * b.d + b.p * a.d, a.n * b.d + b.n * a.d, a.d * b.d, N.mul_pos a.pos b.pos⟩
def mul (a b : Frac) : Frac := ⟨a.p * b.p + a.n * b.n, a.p * b.n + a.n * b.p, a.d * b.d, N.mul_pos a.pos b.pos⟩
def neg (a : Frac) : Frac := ⟨a.n, a.p, a.d, a.pos⟩
/-- `d/k` for `k > 0`, and `0` for `k = 0`. -/
def flip (d : Nat) : Nat → Frac
  | .zero => ⟨0, 0, 1, Nat.le.refl⟩
  | .succ k => ⟨d, 0, Nat.succ k, Nat.succ_le_succ (Nat.zero_le k)⟩
/-- The inverse: one of the two truncated differences is zero. -/
def inv (a : Frac) : Frac := add (flip a.d (a.p - a.n)) (neg (flip a.d (a.n - a.p)))

theorem same_of_eq {a b : Frac} (hp : a.p = b.p) (hn : a.n = b.n) (hd : a.d = b.d) : Same a b := by
  show a.p * b.d + b.n * a.d = b.p * a.d + a.n * b.d
  rw [hp, hn, hd]
theorem same_of_scale {a b : Frac} (k : Nat) (hp : b.p = k * a.p) (hn : b.n = k * a.n) (hd : b.d = k * a.d) : Same a b := by
  show a.p * b.d + b.n * a.d = b.p * a.d + a.n * b.d
  rw [hp, hn, hd, N.mul_left_comm a.p, N.mul_left_comm a.n, N.mul_assoc, N.mul_assoc]
theorem leB_iff (a b : Frac) : leB a b = true ↔ a.p * b.d + b.n * a.d ≤ b.p * a.d + a.n * b.d :=
  ⟨Nat.le_of_ble_eq_true, Nat.ble_eq_true_of_le⟩

theorem add_congr {a a' b : Frac} (h : Same a a') : Same (add a b) (add a' b) := by
  show (a.p * b.d + b.p * a.d) * (a'.d * b.d) + (a'.n * b.d + b.n * a'.d) * (a.d * b.d)
    = (a'.p * b.d + b.p * a'.d) * (a.d * b.d) + (a.n * b.d + b.n * a.d) * (a'.d * b.d)
  have e1 : (a.p * b.d + b.p * a.d) * (a'.d * b.d) + (a'.n * b.d + b.n * a'.d) * (a.d * b.d)
      = (a.p * a'.d + a'.n * a.d) * (b.d * b.d) + (b.p * (a.d * (a'.d * b.d)) + b.n * (a.d * (a'.d * b.d))) := by
    simp only [Nat.mul_add, N.add_mul, Nat.mul_comm, N.mul_left_comm, N.mul_assoc, Nat.add_comm, Nat.add_left_comm, Nat.add_assoc]
  have e2 : (a'.p * b.d + b.p * a'.d) * (a.d * b.d) + (a.n * b.d + b.n * a.d) * (a'.d * b.d)
      = (a'.p * a.d + a.n * a'.d) * (b.d * b.d) + (b.p * (a.d * (a'.d * b.d)) + b.n * (a.d * (a'.d * b.d))) := by
    simp only [Nat.mul_add, N.add_mul, Nat.mul_comm, N.mul_left_comm, N.mul_assoc, Nat.add_comm, Nat.add_left_comm, Nat.add_assoc]
  rw [e1, e2, show a.p * a'.d + a'.n * a.d = a'.p * a.d + a.n * a'.d from h]
theorem mul_congr {a a' b : Frac} (h : Same a a') : Same (mul a b) (mul a' b) := by
  show (a.p * b.p + a.n * b.n) * (a'.d * b.d) + (a'.p * b.n + a'.n * b.p) * (a.d * b.d)
    = (a'.p * b.p + a'.n * b.n) * (a.d * b.d) + (a.p * b.n + a.n * b.p) * (a'.d * b.d)
  have e1 : (a.p * b.p + a.n * b.n) * (a'.d * b.d) + (a'.p * b.n + a'.n * b.p) * (a.d * b.d)
      = (a.p * a'.d + a'.n * a.d) * (b.p * b.d) + (a'.p * a.d + a.n * a'.d) * (b.n * b.d) := by
    simp only [Nat.mul_add, N.add_mul, Nat.mul_comm, N.mul_left_comm, N.mul_assoc, Nat.add_comm, Nat.add_left_comm, Nat.add_assoc]
  have e2 : (a'.p * b.p + a'.n * b.n) * (a.d * b.d) + (a.p * b.n + a.n * b.p) * (a'.d * b.d)
      = (a'.p * a.d + a.n * a'.d) * (b.p * b.d) + (a.p * a'.d + a'.n * a.d) * (b.n * b.d) := by
    simp only [Nat.mul_add, N.add_mul, Nat.mul_comm, N.mul_left_comm, N.mul_assoc, Nat.add_comm, Nat.add_left_comm, Nat.add_assoc]
  rw [e1, e2, show a.p * a'.d + a'.n * a.d = a'.p * a.d + a.n * a'.d from h]
theorem neg_congr {a a' : Frac} (h : Same a a') : Same (neg a) (neg a') := by
  show a.n * a'.d + a'.p * a.d = a'.n * a.d + a.p * a'.d
  rw [Nat.add_comm, Nat.add_comm (a'.n * a.d)]
  exact h.symm
theorem add_comm_same (a b : Frac) : Same (add a b) (add b a) := same_of_eq (Nat.add_comm _ _) (Nat.add_comm _ _) (Nat.mul_comm _ _)
theorem mul_comm_same (a b : Frac) : Same (mul a b) (mul b a) := by
  refine same_of_eq ?_ ?_ (Nat.mul_comm _ _)
  · show a.p * b.p + a.n * b.n = b.p * a.p + b.n * a.n
    simp only [Nat.mul_add, N.add_mul, Nat.mul_comm, N.mul_left_comm, N.mul_assoc, Nat.add_comm, Nat.add_left_comm, Nat.add_assoc]
  · show a.p * b.n + a.n * b.p = b.p * a.n + b.n * a.p
    simp only [Nat.mul_add, N.add_mul, Nat.mul_comm, N.mul_left_comm, N.mul_assoc, Nat.add_comm, Nat.add_left_comm, Nat.add_assoc]
theorem trans {a b c : Frac} (h : Same a b) (h' : Same b c) : Same a c := by
  refine N.eq_of_mul_eq b.pos (N.add_cancel (c := b.p * (a.d * c.d) + b.n * (a.d * c.d)) ?_)
  have e1 : (a.p * c.d + c.n * a.d) * b.d + (b.p * (a.d * c.d) + b.n * (a.d * c.d)) = (a.p * b.d + b.n * a.d) * c.d + (b.p * c.d + c.n * b.d) * a.d := by
    simp only [Nat.mul_add, N.add_mul, Nat.mul_comm, N.mul_left_comm, N.mul_assoc, Nat.add_comm, Nat.add_left_comm, Nat.add_assoc]
  have e2 : (c.p * a.d + a.n * c.d) * b.d + (b.p * (a.d * c.d) + b.n * (a.d * c.d)) = (b.p * a.d + a.n * b.d) * c.d + (c.p * b.d + b.n * c.d) * a.d := by
    simp only [Nat.mul_add, N.add_mul, Nat.mul_comm, N.mul_left_comm, N.mul_assoc, Nat.add_comm, Nat.add_left_comm, Nat.add_assoc]
  rw [e1, e2, show a.p * b.d + b.n * a.d = b.p * a.d + a.n * b.d from h, show b.p * c.d + c.n * b.d = c.p * b.d + b.n * c.d from h']
theorem symm {a b : Frac} (h : Same a b) : Same b a := Eq.symm h

/-- Transitivity of the order on fractions. -/
theorem le_trans {a b c : Frac} (h : leB a b = true) (h' : leB b c = true) : leB a c = true := by
  rw [leB_iff] at h h' ⊢
  refine N.le_of_mul_le b.pos (N.le_of_add_le (c := b.p * (a.d * c.d) + b.n * (a.d * c.d)) ?_)
  have e1 : (a.p * c.d + c.n * a.d) * b.d + (b.p * (a.d * c.d) + b.n * (a.d * c.d)) = (a.p * b.d + b.n * a.d) * c.d + (b.p * c.d + c.n * b.d) * a.d := by
    simp only [Nat.mul_add, N.add_mul, Nat.mul_comm, N.mul_left_comm, N.mul_assoc, Nat.add_comm, Nat.add_left_comm, Nat.add_assoc]
  have e2 : (c.p * a.d + a.n * c.d) * b.d + (b.p * (a.d * c.d) + b.n * (a.d * c.d)) = (b.p * a.d + a.n * b.d) * c.d + (c.p * b.d + b.n * c.d) * a.d := by
    simp only [Nat.mul_add, N.add_mul, Nat.mul_comm, N.mul_left_comm, N.mul_assoc, Nat.add_comm, Nat.add_left_comm, Nat.add_assoc]
  rw [e1, e2]
  exact N.add_le_add (N.mul_le_mul_right _ h) (N.mul_le_mul_right _ h')
theorem le_of_same {a b : Frac} (h : Same a b) : leB a b = true := (leB_iff a b).mpr (by rw [show a.p * b.d + b.n * a.d = _ from h]; exact Nat.le.refl)
theorem bool_eq {x y : Bool} (h : x = true → y = true) (h' : y = true → x = true) : x = y := by
  cases x with
  | true => exact (h rfl).symm
  | false => cases y with
    | true => exact h' rfl
    | false => rfl
theorem leB_congr_left {a a' b : Frac} (h : Same a a') : leB a b = leB a' b :=
  bool_eq (le_trans (le_of_same (symm h))) (le_trans (le_of_same h))
theorem leB_congr_right {a b b' : Frac} (h : Same b b') : leB a b = leB a b' :=
  bool_eq (fun k => le_trans k (le_of_same h)) (fun k => le_trans k (le_of_same (symm h)))

/-! ### The inverse -/
theorem sub_self (n : Nat) : n - n = 0 := by
  induction n with
  | zero => rfl
  | succ n ih => exact (succ_sub n n).trans ih
where
  succ_sub (n m : Nat) : Nat.succ n - Nat.succ m = n - m := by
    induction m with
    | zero => rfl
    | succ m ih => exact congrArg Nat.pred ih
theorem add_sub (n k : Nat) : (n + k) - n = k := by
  induction n with
  | zero => exact Nat.zero_add k
  | succ n ih =>
    rw [Nat.succ_add]
    exact (sub_self.succ_sub (n + k) n).trans ih
theorem sub_add (n k : Nat) : n - (n + k) = 0 := by
  induction n with
  | zero =>
    rw [Nat.zero_add]
    induction k with
    | zero => rfl
    | succ k ih => exact congrArg Nat.pred ih
  | succ n ih =>
    rw [Nat.succ_add]
    exact (sub_self.succ_sub n (n + k)).trans ih
/-- A positive fraction times its inverse is one. -/
theorem mul_inv_pos (a : Frac) (k : Nat) (h : a.p = a.n + Nat.succ k) : Same (mul a (inv a)) ⟨1, 0, 1, Nat.le.refl⟩ := by
  have e : inv a = add (flip a.d (Nat.succ k)) (neg (flip a.d 0)) := by
    show add (flip a.d (a.p - a.n)) (neg (flip a.d (a.n - a.p))) = _
    rw [h, add_sub, sub_add]
  rw [e]
  show (a.p * (a.d * 1 + 0 * Nat.succ k) + a.n * (0 * 1 + 0 * Nat.succ k)) * 1 + 0 * (a.d * (Nat.succ k * 1))
    = 1 * (a.d * (Nat.succ k * 1)) + (a.p * (0 * 1 + 0 * Nat.succ k) + a.n * (a.d * 1 + 0 * Nat.succ k)) * 1
  rw [h]
  generalize Nat.succ k = j
  simp only [Nat.mul_add, N.add_mul, Nat.mul_comm, N.mul_left_comm, N.mul_assoc, Nat.add_comm, Nat.add_left_comm, Nat.add_assoc, Nat.zero_mul, Nat.mul_zero, Nat.add_zero, Nat.zero_add, N.mul_one, N.one_mul]
theorem mul_inv_neg (a : Frac) (k : Nat) (h : a.n = a.p + Nat.succ k) : Same (mul a (inv a)) ⟨1, 0, 1, Nat.le.refl⟩ := by
  have e : inv a = add (flip a.d 0) (neg (flip a.d (Nat.succ k))) := by
    show add (flip a.d (a.p - a.n)) (neg (flip a.d (a.n - a.p))) = _
    rw [h, add_sub, sub_add]
  rw [e]
  show (a.p * (0 * Nat.succ k + 0 * 1) + a.n * (0 * Nat.succ k + a.d * 1)) * 1 + 0 * (a.d * (1 * Nat.succ k))
    = 1 * (a.d * (1 * Nat.succ k)) + (a.p * (0 * Nat.succ k + a.d * 1) + a.n * (0 * Nat.succ k + 0 * 1)) * 1
  rw [h]
  generalize Nat.succ k = j
  simp only [Nat.mul_add, N.add_mul, Nat.mul_comm, N.mul_left_comm, N.mul_assoc, Nat.add_comm, Nat.add_left_comm, Nat.add_assoc, Nat.zero_mul, Nat.mul_zero, Nat.add_zero, Nat.zero_add, N.mul_one, N.one_mul]
end Frac

noncomputable section
/-- The rational numbers. -/
def Q : Type := Quot Frac.Same
namespace Q
open Frac (Same)
def mk (a : Frac) : Q := Quot.mk _ a
theorem sound {a b : Frac} (h : Same a b) : mk a = mk b := Quot.sound h
@[elab_as_elim] theorem ind {p : Q → Prop} (h : ∀ a, p (mk a)) (x : Q) : p x := Quot.ind h x
def lift₂ (f : Frac → Frac → Frac) (hl : ∀ {a a' b}, Same a a' → Same (f a b) (f a' b))
    (hr : ∀ {a b b'}, Same b b' → Same (f a b) (f a b')) : Q → Q → Q :=
  Quot.lift (fun a => Quot.lift (fun b => mk (f a b)) (fun _ _ h => sound (hr h)))
    (fun _ _ h => funext (fun y => ind (fun _ => sound (hl h)) y))
def add : Q → Q → Q := lift₂ Frac.add Frac.add_congr (fun h =>
  Frac.trans (Frac.add_comm_same _ _) (Frac.trans (Frac.add_congr h) (Frac.add_comm_same _ _)))
def mul : Q → Q → Q := lift₂ Frac.mul Frac.mul_congr (fun h =>
  Frac.trans (Frac.mul_comm_same _ _) (Frac.trans (Frac.mul_congr h) (Frac.mul_comm_same _ _)))
def neg : Q → Q := Quot.lift (fun a => mk (Frac.neg a)) (fun _ _ h => sound (Frac.neg_congr h))
def leB : Q → Q → Bool := Quot.lift (fun a => Quot.lift (fun b => Frac.leB a b) (fun _ _ h => Frac.leB_congr_right h))
  (fun _ _ h => funext (fun y => ind (fun _ => Frac.leB_congr_left h) y))
def zero : Q := mk ⟨0, 0, 1, Nat.le.refl⟩
def one : Q := mk ⟨1, 0, 1, Nat.le.refl⟩

theorem add_assoc (x y z : Q) : add (add x y) z = add x (add y z) := by
  refine ind (fun a => ?_) x
  refine ind (fun b => ?_) y
  refine ind (fun c => ?_) z
  refine sound (Frac.same_of_eq ?_ ?_ (N.mul_assoc _ _ _))
  · show (a.p * b.d + b.p * a.d) * c.d + c.p * (a.d * b.d) = a.p * (b.d * c.d) + (b.p * c.d + c.p * b.d) * a.d
    simp only [Nat.mul_add, N.add_mul, Nat.mul_comm, N.mul_left_comm, N.mul_assoc, Nat.add_comm, Nat.add_left_comm, Nat.add_assoc]
  · show (a.n * b.d + b.n * a.d) * c.d + c.n * (a.d * b.d) = a.n * (b.d * c.d) + (b.n * c.d + c.n * b.d) * a.d
    simp only [Nat.mul_add, N.add_mul, Nat.mul_comm, N.mul_left_comm, N.mul_assoc, Nat.add_comm, Nat.add_left_comm, Nat.add_assoc]
theorem add_comm (x y : Q) : add x y = add y x := ind (fun a => ind (fun b => sound (Frac.add_comm_same a b)) y) x
theorem mul_comm (x y : Q) : mul x y = mul y x := ind (fun a => ind (fun b => sound (Frac.mul_comm_same a b)) y) x
theorem add_zero (x : Q) : add x zero = x := by
  refine ind (fun a => sound (Frac.same_of_eq ?_ ?_ (N.mul_one _))) x
  · show a.p * 1 + 0 * a.d = a.p
    rw [N.mul_one, Nat.zero_mul, Nat.add_zero]
  · show a.n * 1 + 0 * a.d = a.n
    rw [N.mul_one, Nat.zero_mul, Nat.add_zero]
theorem add_neg (x : Q) : add x (neg x) = zero := by
  refine ind (fun a => sound ?_) x
  show (a.p * a.d + a.n * a.d) * 1 + 0 * (a.d * a.d) = 0 * (a.d * a.d) + (a.n * a.d + a.p * a.d) * 1
  rw [N.mul_one, N.mul_one, Nat.zero_mul, Nat.zero_add, Nat.add_zero, Nat.add_comm (a.n * a.d)]
theorem mul_assoc (x y z : Q) : mul (mul x y) z = mul x (mul y z) := by
  refine ind (fun a => ?_) x
  refine ind (fun b => ?_) y
  refine ind (fun c => ?_) z
  refine sound (Frac.same_of_eq ?_ ?_ (N.mul_assoc _ _ _))
  · show (a.p * b.p + a.n * b.n) * c.p + (a.p * b.n + a.n * b.p) * c.n = a.p * (b.p * c.p + b.n * c.n) + a.n * (b.p * c.n + b.n * c.p)
    simp only [Nat.mul_add, N.add_mul, Nat.mul_comm, N.mul_left_comm, N.mul_assoc, Nat.add_comm, Nat.add_left_comm, Nat.add_assoc]
  · show (a.p * b.p + a.n * b.n) * c.n + (a.p * b.n + a.n * b.p) * c.p = a.p * (b.p * c.n + b.n * c.p) + a.n * (b.p * c.p + b.n * c.n)
    simp only [Nat.mul_add, N.add_mul, Nat.mul_comm, N.mul_left_comm, N.mul_assoc, Nat.add_comm, Nat.add_left_comm, Nat.add_assoc]
theorem mul_one (x : Q) : mul x one = x := by
  refine ind (fun a => sound (Frac.same_of_eq ?_ ?_ (N.mul_one _))) x
  · show a.p * 1 + a.n * 0 = a.p
    rw [N.mul_one]; rfl
  · show a.p * 0 + a.n * 1 = a.n
    rw [N.mul_one, Nat.mul_zero, Nat.zero_add]
theorem mul_add (x y z : Q) : mul x (add y z) = add (mul x y) (mul x z) := by
  refine ind (fun a => ?_) x
  refine ind (fun b => ?_) y
  refine ind (fun c => sound (Frac.same_of_scale a.d ?_ ?_ ?_)) z
  · show (a.p * b.p + a.n * b.n) * (a.d * c.d) + (a.p * c.p + a.n * c.n) * (a.d * b.d) = a.d * (a.p * (b.p * c.d + c.p * b.d) + a.n * (b.n * c.d + c.n * b.d))
    simp only [Nat.mul_add, N.add_mul, Nat.mul_comm, N.mul_left_comm, N.mul_assoc, Nat.add_comm, Nat.add_left_comm, Nat.add_assoc]
  · show (a.p * b.n + a.n * b.p) * (a.d * c.d) + (a.p * c.n + a.n * c.p) * (a.d * b.d) = a.d * (a.p * (b.n * c.d + c.n * b.d) + a.n * (b.p * c.d + c.p * b.d))
    simp only [Nat.mul_add, N.add_mul, Nat.mul_comm, N.mul_left_comm, N.mul_assoc, Nat.add_comm, Nat.add_left_comm, Nat.add_assoc]
  · show a.d * b.d * (a.d * c.d) = a.d * (a.d * (b.d * c.d))
    rw [N.mul_assoc, N.mul_left_comm b.d]

theorem mul_inv_frac (a : Frac) (h : ¬ a.p = a.n) : mul (mk a) (mk (Frac.inv a)) = one := by
  cases N.trichotomy a.p a.n with
  | inl k => cases k with
    | intro k e => exact sound (Frac.mul_inv_pos a k e)
  | inr k => cases k with
    | inl e => exact absurd e h
    | inr k => cases k with
      | intro k e => exact sound (Frac.mul_inv_neg a k e)
theorem zero_iff {a b : Frac} (h : Same a b) (e : a.p = a.n) : b.p = b.n := by
  refine N.eq_of_mul_eq a.pos (N.add_cancel (c := a.n * b.d) ?_)
  have k : a.p * b.d + b.n * a.d = b.p * a.d + a.n * b.d := h
  rw [e, Nat.add_comm] at k
  exact k.symm
theorem inv_congr {a b : Frac} (h : Same a b) : mk (Frac.inv a) = mk (Frac.inv b) := by
  cases Nat.decEq a.p a.n with
  | isTrue e =>
    have f := zero_iff h e
    have ea : Frac.inv a = Frac.add (Frac.flip 0 0) (Frac.neg (Frac.flip 0 0)) := by
      show Frac.add (Frac.flip a.d (a.p - a.n)) (Frac.neg (Frac.flip a.d (a.n - a.p))) = _
      rw [e, Frac.sub_self]; rfl
    have eb : Frac.inv b = Frac.add (Frac.flip 0 0) (Frac.neg (Frac.flip 0 0)) := by
      show Frac.add (Frac.flip b.d (b.p - b.n)) (Frac.neg (Frac.flip b.d (b.n - b.p))) = _
      rw [f, Frac.sub_self]; rfl
    rw [ea, eb]
  | isFalse e =>
    have e1 := mul_inv_frac a e
    have e2 := mul_inv_frac b (fun f => e (zero_iff (Frac.symm h) f))
    rw [← sound h] at e2
    -- two inverses of the same number
    have k : mul (mk (Frac.inv a)) (mul (mk a) (mk (Frac.inv b))) = mul (mul (mk (Frac.inv a)) (mk a)) (mk (Frac.inv b)) := (mul_assoc _ _ _).symm
    rw [e2, mul_one, mul_comm (mk (Frac.inv a)) (mk a), e1, mul_comm one, mul_one] at k
    exact k
def inv : Q → Q := Quot.lift (fun a => mk (Frac.inv a)) (fun _ _ h => inv_congr h)

instance : Add Q := ⟨add⟩
instance : Mul Q := ⟨mul⟩
instance : Neg Q := ⟨neg⟩
instance : Sub Q := ⟨fun x y => add x (neg y)⟩
instance : Inv Q := ⟨inv⟩
instance : Div Q := ⟨fun x y => mul x (inv y)⟩
instance : LE Q := ⟨fun x y => leB x y = true⟩

/-- **The class of ordered fields is inhabited**: the rationals, built from the naturals.

Code: `fractions.Fraction` (the arithmetic of the bridge).
`python: Fraction(1, 3) + Fraction(1, 6) == Fraction(1, 2) and Fraction(1, 3) < Fraction(1, 2)` -/
instance instOrderedField : OrderedField Q where
  zero := zero
  one := one
  add_assoc := add_assoc
  add_comm := add_comm
  add_zero := add_zero
  add_neg := add_neg
  sub_eq := fun _ _ => rfl
  mul_assoc := mul_assoc
  mul_comm := mul_comm
  mul_one := mul_one
  mul_add := mul_add
  mul_inv := fun x => by
    refine ind (fun a h => ?_) x
    refine mul_inv_frac a (fun e => h (sound ?_))
    show a.p * 1 + 0 * a.d = 0 * a.d + a.n * 1
    rw [e, Nat.zero_mul, Nat.add_comm]
  div_eq := fun _ _ => rfl
  zero_ne_one := fun e => by
    have h : leB one zero = true := by
      rw [← e]; rfl
    exact Bool.noConfusion h
  le_refl := fun x => ind (fun a => Frac.le_of_same (a := a) (b := a) rfl) x
  le_trans := fun {x y z} => by
    refine ind (fun a => ?_) x
    refine ind (fun b => ?_) y
    exact ind (fun c h h' => Frac.le_trans h h') z
  le_antisymm := fun {x y} => by
    refine ind (fun a => ?_) x
    exact ind (fun b h h' => sound (N.le_antisymm ((Frac.leB_iff a b).mp h) ((Frac.leB_iff b a).mp h'))) y
  le_total := fun x y => by
    refine ind (fun a => ?_) x
    refine ind (fun b => ?_) y
    exact (N.le_total (a.p * b.d + b.n * a.d) (b.p * a.d + a.n * b.d)).elim
      (fun h => Or.inl ((Frac.leB_iff a b).mpr h)) (fun h => Or.inr ((Frac.leB_iff b a).mpr h))
  add_le_add_left := fun {x y} z => by
    refine ind (fun a => ?_) x
    refine ind (fun b => ?_) y
    refine ind (fun c h => ?_) z
    refine (Frac.leB_iff _ _).mpr ?_
    show (c.p * a.d + a.p * c.d) * (c.d * b.d) + (c.n * b.d + b.n * c.d) * (c.d * a.d)
      ≤ (c.p * b.d + b.p * c.d) * (c.d * a.d) + (c.n * a.d + a.n * c.d) * (c.d * b.d)
    have e1 : (c.p * a.d + a.p * c.d) * (c.d * b.d) + (c.n * b.d + b.n * c.d) * (c.d * a.d)
        = (a.p * b.d + b.n * a.d) * (c.d * c.d) + (c.p * (a.d * (b.d * c.d)) + c.n * (a.d * (b.d * c.d))) := by
      simp only [Nat.mul_add, N.add_mul, Nat.mul_comm, N.mul_left_comm, N.mul_assoc, Nat.add_comm, Nat.add_left_comm, Nat.add_assoc]
    have e2 : (c.p * b.d + b.p * c.d) * (c.d * a.d) + (c.n * a.d + a.n * c.d) * (c.d * b.d)
        = (b.p * a.d + a.n * b.d) * (c.d * c.d) + (c.p * (a.d * (b.d * c.d)) + c.n * (a.d * (b.d * c.d))) := by
      simp only [Nat.mul_add, N.add_mul, Nat.mul_comm, N.mul_left_comm, N.mul_assoc, Nat.add_comm, Nat.add_left_comm, Nat.add_assoc]
    rw [e1, e2]
    exact N.add_le_add_right _ (N.mul_le_mul_right _ ((Frac.leB_iff a b).mp h))
  mul_nonneg := fun {x y} => by
    refine ind (fun a => ?_) x
    refine ind (fun b h h' => ?_) y
    have ha : a.n ≤ a.p := by
      have k := (Frac.leB_iff ⟨0, 0, 1, Nat.le.refl⟩ a).mp h
      have k2 : 0 * a.d + a.n * 1 ≤ a.p * 1 + 0 * a.d := k
      rw [N.mul_one, N.mul_one, Nat.zero_mul, Nat.zero_add] at k2
      exact k2
    have hb : b.n ≤ b.p := by
      have k := (Frac.leB_iff ⟨0, 0, 1, Nat.le.refl⟩ b).mp h'
      have k2 : 0 * b.d + b.n * 1 ≤ b.p * 1 + 0 * b.d := k
      rw [N.mul_one, N.mul_one, Nat.zero_mul, Nat.zero_add] at k2
      exact k2
    refine (Frac.leB_iff _ _).mpr ?_
    show 0 * (a.d * b.d) + (a.p * b.n + a.n * b.p) * 1 ≤ (a.p * b.p + a.n * b.n) * 1 + 0 * (a.d * b.d)
    rw [N.mul_one, N.mul_one, Nat.zero_mul, Nat.zero_add, Nat.add_zero]
    -- with a.p = a.n + i and b.p = b.n + j the difference is i j
    cases N.le_iff.mp ha with
    | intro i ei => cases N.le_iff.mp hb with
      | intro j ej =>
        rw [ei, ej]
        refine N.le_iff.mpr ⟨i * j, ?_⟩
        simp only [Nat.mul_add, N.add_mul, Nat.mul_comm, N.mul_left_comm, N.mul_assoc, Nat.add_comm, Nat.add_left_comm, Nat.add_assoc]
  decLe := fun x y => Bool.decEq (leB x y) true
end Q
/-- The rational `p/d`, `d > 0`. -/
def q (p d : Nat) : Q := (ofNat p : Q) / ofNat d
example : q 1 3 + q 1 6 = q 1 2 := le_antisymm (of_decide_eq_true rfl) (of_decide_eq_true rfl)
example : q 1 3 < q 1 2 := fun h => absurd h (by decide)
end
end WitCert
