prelude
set_option linter.all false

/-!
# Propositions and equality

The part of the logic that Lean's elaborator and kernel refer to by name. There is no notation yet: it needs macros, and macros need
data (`Core.Macro`).
-/
universe u v w

/-! The code generator marks what it erased with these. They are unsafe, so no theorem can use them. -/
unsafe axiom lcErased : Type
unsafe axiom lcProof {p : Prop} : p
unsafe axiom lcAny : Type
unsafe axiom lcVoid : Type
unsafe axiom lcUnreachable {α : Sort u} : α

@[inline] def id {α : Sort u} (a : α) : α := a
set_option checkBinderAnnotations false in
@[reducible] def inferInstance {α : Sort u} [i : α] : α := i
/-- The type of an argument with a default value. -/
@[reducible] def optParam (α : Sort u) (default : α) : Sort u := α
/-- The type of a class's argument that instance search finds. -/
@[reducible] def outParam (α : Sort u) : Sort u := α

inductive True : Prop where
  | intro : True
inductive False : Prop
def Not (p : Prop) : Prop := p → False
@[macro_inline] def False.elim {α : Sort u} (h : False) : α := False.rec (fun _ => α) h
@[macro_inline] def absurd {p : Prop} {α : Sort v} (h : p) (n : Not p) : α := False.elim (n h)

inductive Eq : α → α → Prop where
  | refl (a : α) : Eq a a
@[match_pattern] def rfl {α : Sort u} {a : α} : Eq a a := Eq.refl a
abbrev Eq.ndrec.{i, j} {α : Sort j} {a : α} {motive : α → Sort i} (m : motive a) {b : α} (h : Eq a b) : motive b := h.rec m
theorem Eq.symm {α : Sort u} {a b : α} (h : Eq a b) : Eq b a := h.rec rfl
theorem Eq.trans {α : Sort u} {a b c : α} (h : Eq a b) (k : Eq b c) : Eq a c := k.rec h
@[macro_inline] def Eq.mp {α β : Sort u} (h : Eq α β) (a : α) : β := h.rec a
@[macro_inline] def Eq.mpr {α β : Sort u} (h : Eq α β) (b : β) : α := h.symm.rec b
@[macro_inline] def cast {α β : Sort u} (h : Eq α β) (a : α) : β := h.rec a
theorem congrArg {α : Sort u} {β : Sort v} {a b : α} (f : α → β) (h : Eq a b) : Eq (f a) (f b) := h.rec rfl
theorem congrFun {α : Sort u} {β : α → Sort v} {f g : (x : α) → β x} (h : Eq f g) (a : α) : Eq (f a) (g a) := h.rec rfl
theorem congr {α : Sort u} {β : Sort v} {f g : α → β} {a b : α} (h : Eq f g) (k : Eq a b) : Eq (f a) (g b) := h.rec (congrArg f k)
@[reducible] def Ne {α : Sort u} (a b : α) : Prop := Not (Eq a b)

/-- Equality of terms whose types are not known to agree; patterns are compiled with it. -/
inductive HEq : {α : Sort u} → α → {β : Sort u} → β → Prop where
  | refl (a : α) : HEq a a
theorem eq_of_heq {α : Sort u} {a b : α} (h : HEq a b) : Eq a b :=
  have general : (β : Sort u) → (b : β) → HEq a b → (e : Eq α β) → Eq (cast e a) b := fun _ _ h => h.rec (fun _ => rfl)
  general α b h rfl
theorem heq_of_eq {α : Sort u} {a b : α} (h : Eq a b) : HEq a b := h.rec (HEq.refl a)

/-! ## Types that definitions by cases and recursion are compiled to -/

set_option bootstrap.inductiveCheckResultingUniverse false in
inductive PUnit : Sort u where
  | unit : PUnit
abbrev Unit : Type := PUnit
@[match_pattern] abbrev Unit.unit : Unit := PUnit.unit
structure Prod (α : Type u) (β : Type v) where
  fst : α
  snd : β
structure PProd (α : Sort u) (β : Sort v) where
  fst : α
  snd : β
structure PLift (α : Sort u) : Type u where
  up ::
  down : α
structure ULift.{r, s} (α : Type s) : Type (max s r) where
  up ::
  down : α
set_option bootstrap.inductiveCheckResultingUniverse false in
structure PULift.{r, s} (α : Sort s) : Sort (max s r 1) where
  up ::
  down : α
class Inhabited (α : Sort u) where
  default : α
export Inhabited (default)

/-! ## Connectives -/

structure And (p q : Prop) : Prop where
  intro ::
  left : p
  right : q
inductive Or (p q : Prop) : Prop where
  | inl (h : p) : Or p q
  | inr (h : q) : Or p q
theorem Or.elim {p q r : Prop} (h : Or p q) (left : p → r) (right : q → r) : r := h.rec left right
structure Iff (p q : Prop) : Prop where
  intro ::
  mp : p → q
  mpr : q → p
inductive Exists {α : Sort u} (p : α → Prop) : Prop where
  | intro (w : α) (h : p w) : Exists p

/-! Quotients belong to the kernel; with the next two axioms they are all that a proof may assume. -/
init_quot
axiom Quot.sound : ∀ {α : Sort u} {r : α → α → Prop} {a b : α}, r a b → Eq (Quot.mk r a) (Quot.mk r b)
axiom propext {p q : Prop} : Iff p q → Eq p q
class inductive Nonempty (α : Sort u) : Prop where
  | intro (val : α) : Nonempty α
axiom Classical.choice {α : Sort u} : Nonempty α → α
