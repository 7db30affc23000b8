prelude
import Core.Tactic
set_option linter.all false
universe u v

/-! # Lemmas that `simp only` builds its proofs from, under the names that it refers to -/

theorem of_eq_true {p : Prop} (h : p = True) : p := h.mpr True.intro
theorem eq_true {p : Prop} (h : p) : p = True := propext ⟨fun _ => True.intro, fun _ => h⟩
theorem eq_false {p : Prop} (h : ¬p) : p = False := propext ⟨h, False.elim⟩
theorem eq_self (a : α) : (a = a) = True := eq_true rfl
theorem iff_self (p : Prop) : (p ↔ p) = True := eq_true ⟨id, id⟩
theorem congrFun' {α : Sort u} {β : Sort v} {f g : α → β} (h : f = g) (a : α) : f a = g a := congrFun h a
theorem implies_congr {p q : Sort u} {r s : Sort v} (h : p = q) (k : r = s) : (p → r) = (q → s) := by rw [h, k]
theorem forall_congr {α : Sort u} {p q : α → Prop} (h : ∀ a, p a = q a) : (∀ a, p a) = (∀ a, q a) :=
  propext ⟨fun k a => (h a).mp (k a), fun k a => (h a).mpr (k a)⟩
/-- Functions that agree everywhere are equal: both are read out of one class of functions that agree. -/
theorem funext {α : Sort u} {β : α → Sort v} {f g : (x : α) → β x} (h : ∀ x, f x = g x) : f = g :=
  let agree (f g : (x : α) → β x) : Prop := ∀ x, f x = g x
  let read (q : Quot agree) (x : α) := Quot.lift (fun (f : (x : α) → β x) => f x) (fun _ _ h => h x) q
  show read (Quot.mk agree f) = read (Quot.mk agree g) from congrArg read (Quot.sound h)
