prelude
import Core.Notation
set_option linter.all false

/-! # Syntax of tactics: the shapes that Lean's own tactics expect, under the names they are registered for -/

namespace Lean
syntax cdotTk := patternIgnore(orelse("· ", ". "))
syntax (name := cdot) cdotTk withoutPosition(tacticSeq) : tactic
syntax binderIdent := orelse(ident, hole)
end Lean
namespace Lean.Parser.Tactic
syntax posConfigItem := " +" noWs ident
syntax negConfigItem := " -" noWs ident
syntax valConfigItem := atomic(" (" ident " := ") withoutPosition(term) ")"
syntax configItem := ppSpace colGt orelse(posConfigItem, orelse(negConfigItem, valConfigItem))
syntax optConfig := many(colGt configItem)

syntax (name := intro) "intro" notFollowedBy("|") many(ppSpace colGt term:1024) : tactic
syntax (name := revert) "revert" many1(ppSpace colGt term:1024) : tactic
syntax (name := clear) "clear" many1(ppSpace colGt term:1024) : tactic
syntax (name := apply) "apply " term : tactic
syntax (name := exact) "exact " term : tactic
syntax (name := refine) "refine " term : tactic
syntax (name := constructor) "constructor" : tactic
syntax (name := left) "left" : tactic
syntax (name := right) "right" : tactic
syntax (name := «show») "show " term : tactic
syntax (name := eqRefl) "eq_refl" : tactic
syntax (name := withReducible) "with_reducible " tacticSeq : tactic
syntax (name := first) "first " withPosition(many1(ppDedent(ppLine) colGe "| " tacticSeq)) : tactic
syntax (name := paren) "(" withoutPosition(tacticSeq) ")" : tactic
syntax (name := allGoals) "all_goals " tacticSeq : tactic
syntax (name := skip) "skip" : tactic
syntax (name := decide) "decide" optConfig : tactic
macro "rfl" : tactic => `(tactic| eq_refl)
macro "exfalso" : tactic => `(tactic| refine False.elim ?_)
macro "have " x:ident " : " t:term " := " v:term : tactic => `(tactic| refine (have $x : $t := $v; ?_))
macro "have " x:ident " := " v:term : tactic => `(tactic| refine (have $x := $v; ?_))

syntax locationWildcard := " *"
syntax locationHyp := many1(ppSpace colGt term:1024) 
syntax location := withPosition(ppGroup(" at" orelse(locationWildcard, locationHyp)))

syntax rwRule := optional(patternIgnore(orelse("← ", "<- "))) term
syntax rwRuleSeq := " [" withoutPosition(sepBy(rwRule, ",", ", ", allowTrailingSep)) "]"
syntax (name := rewriteSeq) "rewrite" optConfig rwRuleSeq optional(location) : tactic
macro "rw " s:rwRuleSeq : tactic => `(tactic| (rewrite $s:rwRuleSeq; first | with_reducible eq_refl | skip))
macro "rw " s:rwRuleSeq l:location : tactic => `(tactic| (rewrite $s:rwRuleSeq $l:location; first | with_reducible eq_refl | skip))

syntax elimTarget := optional(atomic(binderIdent " : ")) term
syntax inductionAltLHS := withPosition(ppDedent(ppLine) colGe) "| " orelse(group(optional("@") ident), hole) many(colGt orelse(ident, hole))
syntax inductionAlt := many1(inductionAltLHS) optional(" => " orelse(hole, orelse(syntheticHole, tacticSeq)))
syntax inductionAlts := " with" optional(ppSpace colGt tactic) withPosition(many(colGe inductionAlt))
syntax (name := induction) "induction " sepBy1(elimTarget, ", ") optional(" using " term) optional(" generalizing" many1(ppSpace colGt term:1024)) optional(inductionAlts) : tactic
syntax (name := cases) "cases " sepBy1(elimTarget, ", ") optional(" using " term) optional(inductionAlts) : tactic

syntax generalizeArg := optional(atomic(ident " : ")) term:51 " = " ident
syntax (name := generalize) "generalize " sepBy1(generalizeArg, ", ") optional(location) : tactic

syntax discharger := atomic(" (" patternIgnore(orelse(&"discharger", &"disch"))) " := " withoutPosition(tacticSeq) ")"
syntax simpPre := "↓"
syntax simpPost := "↑"
syntax simpLemma := optional(orelse(simpPre, simpPost)) optional(patternIgnore(orelse("← ", "<- "))) term
syntax simpErase := "-" term:1024
syntax simpStar := "*"
syntax (name := simp) "simp" optConfig optional(discharger) optional(&" only")
  optional(" [" withoutPosition(sepBy(orelse(simpStar, orelse(simpErase, simpLemma)), ",", ", ", allowTrailingSep)) "]") optional(location) : tactic
end Lean.Parser.Tactic
