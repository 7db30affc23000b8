prelude
import Core.Macro
set_option linter.all false

/-! # Notation of terms, with Lean's precedences -/

syntax:65 term:65 " + " term:66 : term
syntax:65 term:65 " - " term:66 : term
syntax:70 term:70 " * " term:71 : term
syntax:70 term:70 " / " term:71 : term
syntax:75 (name := neg) "-" term:75 : term
syntax:1024 term:1024 "⁻¹" : term
syntax:50 term:51 " = " term:51 : term
syntax:50 term:51 " ≠ " term:51 : term
syntax:50 term:51 " ≤ " term:51 : term
syntax:50 term:51 " < " term:51 : term
syntax:50 term:51 " ≥ " term:51 : term
syntax:50 term:51 " > " term:51 : term
syntax:35 term:36 " ∧ " term:35 : term
syntax:30 term:31 " ∨ " term:30 : term
syntax:20 term:21 " ↔ " term:21 : term
syntax:1024 "¬" term:40 : term
syntax:35 term:36 " × " term:35 : term
syntax:67 term:68 " :: " term:67 : term
macro_rules
  | `($a + $b) => `(binop% HAdd.hAdd $a $b)
  | `($a - $b) => `(binop% HSub.hSub $a $b)
  | `($a * $b) => `(binop% HMul.hMul $a $b)
  | `($a / $b) => `(binop% HDiv.hDiv $a $b)
  | `(-$a) => `(unop% Neg.neg $a)
  | `($a⁻¹) => `(unop% Inv.inv $a)
  | `($a = $b) => `(binrel% Eq $a $b)
  | `($a ≠ $b) => `(binrel% Ne $a $b)
  | `($a ≤ $b) => `(binrel% LE.le $a $b)
  | `($a < $b) => `(binrel% LT.lt $a $b)
  | `($a ≥ $b) => `(binrel% GE.ge $a $b)
  | `($a > $b) => `(binrel% GT.gt $a $b)
  | `($a ∧ $b) => `(And $a $b)
  | `($a ∨ $b) => `(Or $a $b)
  | `($a ↔ $b) => `(Iff $a $b)
  | `(¬$a) => `(Not $a)
  | `($a × $b) => `(Prod $a $b)
  | `($a :: $l) => `(List.cons $a $l)

syntax "if " term " then " term " else " term : term
macro_rules | `(if $c then $t else $e) => `(ite $c $t $e)

syntax (name := existsOne) "∃ " ident ", " term : term
syntax (name := existsTwo) "∃ " ident ident ", " term : term
syntax (name := existsTyped) "∃ " ident " : " term ", " term : term
macro_rules (kind := existsOne) | `(∃ $x:ident, $p) => `(Exists (fun $x:ident => $p))
macro_rules (kind := existsTwo) | `(∃ $x:ident $y:ident, $p) => `(∃ $x:ident, ∃ $y:ident, $p)
macro_rules (kind := existsTyped) | `(∃ $x:ident : $t, $p) => `(Exists (fun $x:ident : $t => $p))

syntax "[" withoutPosition(sepBy(term, ", ")) "]" : term
macro_rules
  | `([]) => `(List.nil)
  | `([$a]) => `(List.cons $a List.nil)
  | `([$a, $b]) => `(List.cons $a [$b])
  | `([$a, $b, $c]) => `(List.cons $a [$b, $c])
  | `([$a, $b, $c, $d]) => `(List.cons $a [$b, $c, $d])
