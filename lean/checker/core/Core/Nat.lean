prelude
import Core.Logic
set_option linter.all false
universe u v w

/-!
# Truth values, natural numbers and notation's classes

The kernel computes with numerals by the *names* of the operations below. Each of them is therefore defined here and as what the kernel
takes it for, so that no file checked later can give one of the names another meaning.
-/

/-! ## Truth values -/

set_option genCtorIdx false in
inductive Bool : Type where
  | false : Bool
  | true : Bool
export Bool (false true)
@[macro_inline] def cond {α : Sort u} (c : Bool) (t e : α) : α := match c with | true => t | false => e
@[inline] def Bool.not : Bool → Bool | true => false | false => true
@[macro_inline] def Bool.and (a b : Bool) : Bool := match a with | true => b | false => false
@[macro_inline] def Bool.or (a b : Bool) : Bool := match a with | true => true | false => b
export Bool (not and or)

set_option genCtorIdx false in
inductive Nat where
  | zero : Nat
  | succ (n : Nat) : Nat
class OfNat (α : Type u) (_ : Nat) where
  ofNat : α
@[default_instance 100] instance instOfNatNat (n : Nat) : OfNat Nat n := ⟨n⟩

set_option bootstrap.genMatcherCode false in
@[extern "lean_nat_dec_eq"] def Nat.beq : Nat → Nat → Bool
  | .zero, .zero => true
  | .succ m, .succ n => Nat.beq m n
  | .zero, .succ _ => false
  | .succ _, .zero => false
set_option bootstrap.genMatcherCode false in
@[extern "lean_nat_dec_le"] def Nat.ble : Nat → Nat → Bool
  | .zero, _ => true
  | .succ _, .zero => false
  | .succ m, .succ n => Nat.ble m n

class inductive Decidable (p : Prop) where
  | isFalse (h : Not p) : Decidable p
  | isTrue (h : p) : Decidable p
export Decidable (isTrue isFalse)
@[inline_if_reduce, nospecialize] def Decidable.decide (p : Prop) [h : Decidable p] : Bool :=
  h.casesOn (fun _ => false) (fun _ => true)
export Decidable (decide)
instance [h : Decidable p] : Decidable (Not p) := h.casesOn (fun n => isTrue n) (fun h => isFalse (fun n => n h))
abbrev DecidableEq (α : Sort u) := (a b : α) → Decidable (Eq a b)
def decEq {α : Sort u} [inst : DecidableEq α] (a b : α) : Decidable (Eq a b) := inst a b
@[macro_inline] def ite {α : Sort u} (c : Prop) [h : Decidable c] (t e : α) : α := h.casesOn (fun _ => e) (fun _ => t)
@[macro_inline] def dite {α : Sort u} (c : Prop) [h : Decidable c] (t : c → α) (e : Not c → α) : α := h.casesOn e t

theorem of_decide_eq_true {p : Prop} [h : Decidable p] : Eq (decide p) true → p :=
  h.casesOn (fun _ e => Bool.noConfusion e) (fun h _ => h)

/-! ## Equality and order of numbers, decided -/

theorem Nat.eq_of_beq_eq_true : {m n : Nat} → Eq (Nat.beq m n) true → Eq m n
  | .zero, .zero, _ => rfl
  | .succ _, .succ _, h => congrArg Nat.succ (eq_of_beq_eq_true h)
  | .zero, .succ _, h => Bool.noConfusion h
  | .succ _, .zero, h => Bool.noConfusion h
theorem Nat.beq_refl : (n : Nat) → Eq (Nat.beq n n) true
  | .zero => rfl
  | .succ n => beq_refl n
theorem Nat.ne_of_beq_eq_false {m n : Nat} (h : Eq (Nat.beq m n) false) : Not (Eq m n) := fun e =>
  have : Eq (Nat.beq m n) true := e.rec (beq_refl m)
  Bool.noConfusion (h.symm.trans this)
@[extern "lean_nat_dec_eq"] protected def Nat.decEq (m n : Nat) : Decidable (Eq m n) :=
  match h : Nat.beq m n with
  | true => isTrue (eq_of_beq_eq_true h)
  | false => isFalse (ne_of_beq_eq_false h)
instance : DecidableEq Nat := Nat.decEq
def Bool.decEq : (a b : Bool) → Decidable (Eq a b)
  | true, true => isTrue rfl
  | false, false => isTrue rfl
  | true, false => isFalse (fun h => Bool.noConfusion h)
  | false, true => isFalse (fun h => Bool.noConfusion h)
instance : DecidableEq Bool := Bool.decEq
/-! ## Operations -/

class Add (α : Type u) where add : α → α → α
class Sub (α : Type u) where sub : α → α → α
class Mul (α : Type u) where mul : α → α → α
class Div (α : Type u) where div : α → α → α
class Neg (α : Type u) where neg : α → α
class Inv (α : Type u) where inv : α → α
class HAdd (α : Type u) (β : Type v) (γ : outParam (Type w)) where hAdd : α → β → γ
class HSub (α : Type u) (β : Type v) (γ : outParam (Type w)) where hSub : α → β → γ
class HMul (α : Type u) (β : Type v) (γ : outParam (Type w)) where hMul : α → β → γ
class HDiv (α : Type u) (β : Type v) (γ : outParam (Type w)) where hDiv : α → β → γ
@[default_instance] instance instHAdd [Add α] : HAdd α α α := ⟨Add.add⟩
@[default_instance] instance instHSub [Sub α] : HSub α α α := ⟨Sub.sub⟩
@[default_instance] instance instHMul [Mul α] : HMul α α α := ⟨Mul.mul⟩
@[default_instance] instance instHDiv [Div α] : HDiv α α α := ⟨Div.div⟩
attribute [match_pattern] Add.add HAdd.hAdd Neg.neg

set_option bootstrap.genMatcherCode false in
@[extern "lean_nat_add", match_pattern] protected def Nat.add : Nat → Nat → Nat
  | m, .zero => m
  | m, .succ n => .succ (Nat.add m n)
set_option bootstrap.genMatcherCode false in
@[extern "lean_nat_pred"] def Nat.pred : Nat → Nat
  | .zero => .zero
  | .succ n => n
set_option bootstrap.genMatcherCode false in
@[extern "lean_nat_sub"] protected def Nat.sub : Nat → Nat → Nat
  | m, .zero => m
  | m, .succ n => Nat.pred (Nat.sub m n)
set_option bootstrap.genMatcherCode false in
@[extern "lean_nat_mul"] protected def Nat.mul : Nat → Nat → Nat
  | _, .zero => .zero
  | m, .succ n => Nat.add (Nat.mul m n) m
set_option bootstrap.genMatcherCode false in
@[extern "lean_nat_pow"] protected def Nat.pow : Nat → Nat → Nat
  | _, .zero => 1
  | m, .succ n => Nat.mul (Nat.pow m n) m
instance instAddNat : Add Nat := ⟨Nat.add⟩
instance instSubNat : Sub Nat := ⟨Nat.sub⟩
instance instMulNat : Mul Nat := ⟨Nat.mul⟩
attribute [gen_constructor_elims] Bool Nat

/-- The remainder of `n` by `d`: it grows with `n` until it would be `d`. It is `n` for `d = 0`. -/
def Nat.remainder (d : Nat) : Nat → Nat
  | .zero => .zero
  | .succ n => cond (Nat.beq (succ (remainder d n)) d) .zero (succ (remainder d n))
/-- The quotient of `n` by `d` counts the returns of the remainder to 0. It is 0 for `d = 0`. -/
def Nat.quotient (d : Nat) : Nat → Nat
  | .zero => .zero
  | .succ n => cond (Nat.beq (succ (remainder d n)) d) (succ (quotient d n)) (quotient d n)
/-- The largest common divisor of `m` and `n` that is at most the last argument. -/
def Nat.commonDivisor (m n : Nat) : Nat → Nat
  | .zero => .zero
  | .succ d => cond (and (Nat.beq (remainder (succ d) m) 0) (Nat.beq (remainder (succ d) n) 0)) (succ d) (commonDivisor m n d)
/-- Combine as many of the lowest binary digits of `m` and `n` as the first number says. -/
def Nat.digits (f : Bool → Bool → Bool) : Nat → Nat → Nat → Nat
  | .zero, _, _ => .zero
  | .succ k, m, n =>
    Nat.add (Nat.mul 2 (digits f k (quotient 2 m) (quotient 2 n)))
      (cond (f (Nat.beq (remainder 2 m) 1) (Nat.beq (remainder 2 n) 1)) 1 0)
/-- The largest `k` with `2 ^ k ≤ n`; 0 for `n = 0`. -/
def Nat.logarithm : Nat → Nat
  | .zero => .zero
  | .succ n => cond (Nat.ble (Nat.pow 2 (succ (logarithm n))) (succ n)) (succ (logarithm n)) (logarithm n)

@[extern "lean_nat_div"] protected def Nat.div (m n : Nat) : Nat := quotient n m
@[extern "lean_nat_mod"] protected def Nat.mod (m n : Nat) : Nat := remainder n m
@[extern "lean_nat_gcd"] def Nat.gcd (m n : Nat) : Nat := commonDivisor m n (Nat.add m n)
@[extern "lean_nat_land"] def Nat.land (m n : Nat) : Nat := digits and (Nat.add m n) m n
@[extern "lean_nat_lor"] def Nat.lor (m n : Nat) : Nat := digits or (Nat.add m n) m n
@[extern "lean_nat_lxor"] def Nat.xor (m n : Nat) : Nat := digits (fun a b => cond a (not b) b) (Nat.add m n) m n
@[extern "lean_nat_shiftl"] def Nat.shiftLeft (m n : Nat) : Nat := Nat.mul m (Nat.pow 2 n)
@[extern "lean_nat_shiftr"] def Nat.shiftRight (m n : Nat) : Nat := quotient (Nat.pow 2 n) m
@[extern "lean_nat_log2"] def Nat.log2 (n : Nat) : Nat := logarithm n
instance instDivNat : Div Nat := ⟨Nat.div⟩

/-! The kernel's results agree with the definitions, on all pairs of numbers below 9: the right sides have no name it knows. -/

def Nat.upTo (p : Nat → Bool) : Nat → Bool
  | .zero => true
  | .succ n => and (p n) (upTo p n)
def Nat.agree (f g : Nat → Nat → Nat) : Bool := upTo (fun m => upTo (fun n => Nat.beq (f m n) (g m n)) 9) 9
theorem Nat.div_agrees : Eq (agree Nat.div (fun m n => quotient n m)) true := rfl
theorem Nat.mod_agrees : Eq (agree Nat.mod (fun m n => remainder n m)) true := rfl
theorem Nat.gcd_agrees : Eq (agree Nat.gcd (fun m n => commonDivisor m n (Nat.add m n))) true := rfl
theorem Nat.land_agrees : Eq (agree Nat.land (fun m n => digits and 4 m n)) true := rfl
theorem Nat.lor_agrees : Eq (agree Nat.lor (fun m n => digits or 4 m n)) true := rfl
theorem Nat.xor_agrees : Eq (agree Nat.xor (fun m n => digits (fun a b => cond a (not b) b) 4 m n)) true := rfl
theorem Nat.shiftLeft_agrees : Eq (agree Nat.shiftLeft (fun m n => Nat.mul m (Nat.pow 2 n))) true := rfl
theorem Nat.shiftRight_agrees : Eq (agree Nat.shiftRight (fun m n => quotient (Nat.pow 2 n) m)) true := rfl
theorem Nat.log2_agrees : Eq (agree (fun _ => Nat.log2) (fun _ => logarithm)) true := rfl

/-! ## Order -/

class LE (α : Type u) where le : α → α → Prop
class LT (α : Type u) where lt : α → α → Prop
@[reducible] def GE.ge [LE α] (a b : α) : Prop := LE.le b a
@[reducible] def GT.gt [LT α] (a b : α) : Prop := LT.lt b a

protected inductive Nat.le (m : Nat) : Nat → Prop
  | refl : Nat.le m m
  | step {n} : Nat.le m n → Nat.le m (.succ n)
instance instLENat : LE Nat := ⟨Nat.le⟩
protected def Nat.lt (m n : Nat) : Prop := Nat.le (.succ m) n
instance instLTNat : LT Nat := ⟨Nat.lt⟩
theorem Nat.zero_le : (n : Nat) → LE.le 0 n
  | .zero => Nat.le.refl
  | .succ n => Nat.le.step (zero_le n)
theorem Nat.succ_le_succ {m n : Nat} : LE.le m n → LE.le (succ m) (succ n)
  | Nat.le.refl => Nat.le.refl
  | Nat.le.step h => Nat.le.step (succ_le_succ h)
protected theorem Nat.le_trans {k m n : Nat} : LE.le k m → LE.le m n → LE.le k n
  | h, Nat.le.refl => h
  | h, Nat.le.step i => Nat.le.step (Nat.le_trans h i)
theorem Nat.ble_self_eq_true : (n : Nat) → Eq (Nat.ble n n) true
  | .zero => rfl
  | .succ n => ble_self_eq_true n
theorem Nat.ble_succ_eq_true : {m n : Nat} → Eq (Nat.ble m n) true → Eq (Nat.ble m (succ n)) true
  | .zero, _, _ => rfl
  | .succ m, .succ _, h => ble_succ_eq_true (m := m) h
  | .succ _, .zero, h => Bool.noConfusion h
theorem Nat.ble_eq_true_of_le {m n : Nat} : LE.le m n → Eq (Nat.ble m n) true
  | Nat.le.refl => ble_self_eq_true m
  | Nat.le.step h => ble_succ_eq_true (ble_eq_true_of_le h)
theorem Nat.le_of_ble_eq_true : {m n : Nat} → Eq (Nat.ble m n) true → LE.le m n
  | .zero, n, _ => zero_le n
  | .succ _, .succ _, h => succ_le_succ (le_of_ble_eq_true h)
  | .succ _, .zero, h => Bool.noConfusion h
theorem Nat.not_succ_le_zero (n : Nat) (h : LE.le (succ n) 0) : False := Bool.noConfusion (ble_eq_true_of_le h)
