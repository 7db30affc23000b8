prelude
import Core.Nat
set_option linter.all false
universe u

/-!
# Lists, strings, names and syntax trees

Lean's own compiled code makes and reads all of these except lists, so their layouts and constructor orders are Lean's.
-/

instance : Inhabited Bool := ⟨false⟩
instance : Inhabited Nat := ⟨Nat.zero⟩
inductive Option (α : Type u) where
  | none : Option α
  | some (val : α) : Option α
inductive List (α : Type u) where
  | nil : List α
  | cons (head : α) (tail : List α) : List α
instance : Inhabited (List α) := ⟨List.nil⟩
def List.length : List α → Nat
  | nil => 0
  | cons _ as => HAdd.hAdd (length as) 1

/-- The code generator has arrays of its own; `toList` is what they mean. -/
structure Array (α : Type u) where
  mk ::
  toList : List α
attribute [extern "lean_array_mk"] Array.mk
attribute [extern "lean_array_to_list"] Array.toList
instance : Inhabited (Array α) := ⟨⟨List.nil⟩⟩
@[extern "l_Array_mkArray0"] def Array.mkArray0 {α : Type u} : Array α := ⟨List.nil⟩

structure Char where
  ofNat ::
  toNat : Nat
structure String where
  ofList ::
  toList : List Char
attribute [extern "lean_string_mk"] String.ofList
instance : Inhabited String := ⟨String.ofList List.nil⟩

namespace Lean
inductive Name where
  | anonymous : Name
  | str (pre : Name) (str : String)
  | num (pre : Name) (i : Nat)
attribute [extern "lean_name_mk_string"] Name.str
attribute [extern "lean_name_mk_numeral"] Name.num
instance : Inhabited Name := ⟨Name.anonymous⟩
end Lean
