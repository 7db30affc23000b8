prelude
import Core.Data
set_option linter.all false

/-!
# Macros

What `macro` and `macro_rules` turn into: functions that Lean calls on a syntax tree. They run in one monad only, so its operations are
plain functions under the names that quotations refer to, not type classes.
-/

/-! ## Coercions: Lean unfolds the instance that it finds -/

/-- `x` can stand where a `β` is expected. -/
class CoeT (α : Sort u) (x : α) (β : Sort v) where
  coe : β
/-- An `α` can stand where a function is expected. No instance is needed, but Lean looks for one before it puts a type error off. -/
class CoeFun (α : Sort u) (β : outParam (α → Sort v)) where
  coe : (x : α) → β x
attribute [coe_decl] CoeT.coe CoeFun.coe
/-- Lean puts a type error off while this is undecided, that is until it knows both types. -/
@[coe_decl] instance (x : α) : CoeT α x α := ⟨x⟩

/-! ## Syntax trees -/

structure String.Pos.Raw where
  byteIdx : Nat
structure Substring.Raw where
  str : String
  startPos : String.Pos.Raw
  stopPos : String.Pos.Raw
@[extern "l_String_toRawSubstring_x27"] def String.toRawSubstring' (s : String) : Substring.Raw := ⟨s, ⟨0⟩, ⟨0⟩⟩

namespace Lean
inductive SourceInfo where
  | original (leading : Substring.Raw) (pos : String.Pos.Raw) (trailing : Substring.Raw) (endPos : String.Pos.Raw)
  | synthetic (pos : String.Pos.Raw) (endPos : String.Pos.Raw) (canonical : Bool)
  | none
instance : Inhabited SourceInfo := ⟨SourceInfo.none⟩
abbrev SyntaxNodeKind := Name
inductive Syntax.Preresolved where
  | namespace (ns : Name)
  | decl (n : Name) (fields : List String)
inductive Syntax where
  | missing : Syntax
  | node (info : SourceInfo) (kind : SyntaxNodeKind) (args : Array Syntax) : Syntax
  | atom (info : SourceInfo) (val : String) : Syntax
  | ident (info : SourceInfo) (rawVal : Substring.Raw) (val : Name) (preresolved : List Syntax.Preresolved) : Syntax
instance : Inhabited Syntax := ⟨Syntax.missing⟩
abbrev SyntaxNodeKinds := List SyntaxNodeKind
/-- A tree of one of the given kinds. -/
structure TSyntax (ks : SyntaxNodeKinds) where
  raw : Syntax
@[coe_decl] instance (k : SyntaxNodeKind) : CoeT SyntaxNodeKind k SyntaxNodeKinds := ⟨.cons k .nil⟩
@[coe_decl] instance (x : TSyntax ks) : CoeT (TSyntax ks) x Syntax := ⟨x.raw⟩
@[coe_decl] instance (x : TSyntax ks) : CoeT (TSyntax ks) x (TSyntax ks') := ⟨⟨x.raw⟩⟩

namespace Name
@[extern "l_Lean_Name_mkStr1"] opaque mkStr1 (a : String) : Name
@[extern "l_Lean_Name_mkStr2"] opaque mkStr2 (a b : String) : Name
@[extern "l_Lean_Name_mkStr3"] opaque mkStr3 (a b c : String) : Name
@[extern "l_Lean_Name_mkStr4"] opaque mkStr4 (a b c d : String) : Name
end Name
namespace Syntax
@[extern "l_Lean_Syntax_isOfKind"] opaque isOfKind (stx : Syntax) (k : SyntaxNodeKind) : Bool
@[extern "l_Lean_Syntax_getArg"] opaque getArg (stx : Syntax) (i : Nat) : Syntax
@[extern "l_Lean_Syntax_getArgs"] opaque getArgs (stx : Syntax) : Array Syntax
@[extern "l_Lean_Syntax_getNumArgs"] opaque getNumArgs (stx : Syntax) : Nat
@[extern "l_Lean_Syntax_matchesNull"] opaque matchesNull (stx : Syntax) (n : Nat) : Bool
@[extern "l_Lean_Syntax_node1"] opaque node1 (info : SourceInfo) (kind : SyntaxNodeKind) (a : Syntax) : Syntax
@[extern "l_Lean_Syntax_node2"] opaque node2 (info : SourceInfo) (kind : SyntaxNodeKind) (a b : Syntax) : Syntax
@[extern "l_Lean_Syntax_node3"] opaque node3 (info : SourceInfo) (kind : SyntaxNodeKind) (a b c : Syntax) : Syntax
@[extern "l_Lean_Syntax_node4"] opaque node4 (info : SourceInfo) (kind : SyntaxNodeKind) (a b c d : Syntax) : Syntax
@[extern "l_Lean_Syntax_node5"] opaque node5 (info : SourceInfo) (kind : SyntaxNodeKind) (a b c d e : Syntax) : Syntax
@[extern "l_Lean_Syntax_node6"] opaque node6 (info : SourceInfo) (kind : SyntaxNodeKind) (a b c d e f : Syntax) : Syntax
@[extern "l_Lean_Syntax_node7"] opaque node7 (info : SourceInfo) (kind : SyntaxNodeKind) (a b c d e f g : Syntax) : Syntax
@[extern "l_Lean_Syntax_node8"] opaque node8 (info : SourceInfo) (kind : SyntaxNodeKind) (a b c d e f g h : Syntax) : Syntax
end Syntax
@[extern "l_Lean_addMacroScope"] opaque addMacroScope (mainModule : Name) (n : Name) (scope : Nat) : Name
@[extern "l_Lean_SourceInfo_fromRef"] opaque SourceInfo.fromRef (ref : Syntax) (canonical : Bool) : SourceInfo

/-! ## The monad -/

abbrev MacroScope := Nat
namespace Macro
/-- How Lean's own code passes its methods on; not used here. -/
structure MethodsRef where
  ref : Nat → Nat
structure Context where
  methods : MethodsRef
  quotContext : Name
  currMacroScope : MacroScope
  currRecDepth : Nat
  maxRecDepth : Nat
  ref : Syntax
inductive Exception where
  | error (ref : Syntax) (message : String)
  | unsupportedSyntax
structure State where
  macroScope : MacroScope
  expandedMacroDecls : List Name
  traceMsgs : List (Prod Name String)
inductive Result (α : Type) where
  | ok (value : α) (state : State)
  | error (exception : Exception) (state : State)
end Macro
abbrev MacroM (α : Type) := Macro.Context → Macro.State → Macro.Result α
abbrev Macro := Syntax → MacroM Syntax
@[inline] def MonadRef.mkInfoFromRefPos : MacroM SourceInfo := fun context => .ok (SourceInfo.fromRef context.ref false)
@[inline] def MonadQuotation.getContext : MacroM Name := fun context => .ok context.quotContext
@[inline] def MonadQuotation.getCurrMacroScope : MacroM MacroScope := fun context => .ok context.currMacroScope
end Lean
open Lean
@[inline] def Pure.pure {α : Type} (value : α) : MacroM α := fun _ => .ok value
@[inline] def Bind.bind {α β : Type} (x : MacroM α) (f : α → MacroM β) : MacroM β := fun context state =>
  match x context state with
  | .ok value state => f value context state
  | .error exception state => .error exception state
@[inline] def Functor.map {α β : Type} (f : α → β) (x : MacroM α) : MacroM β := Bind.bind x (fun value => Pure.pure (f value))
@[inline] def MonadExcept.throw {α : Type} (exception : Macro.Exception) : MacroM α := fun _ => .error exception

/-! ## What `syntax` turns into: a description that Lean makes a parser of -/

namespace Lean
inductive ParserDescr where
  | const (name : Name)
  | unary (name : Name) (p : ParserDescr)
  | binary (name : Name) (p₁ p₂ : ParserDescr)
  | node (kind : SyntaxNodeKind) (prec : Nat) (p : ParserDescr)
  | trailingNode (kind : SyntaxNodeKind) (prec lhsPrec : Nat) (p : ParserDescr)
  | symbol (val : String)
  | nonReservedSymbol (val : String) (includeIdent : Bool)
  | cat (catName : Name) (rbp : Nat)
  | parser (declName : Name)
  | nodeWithAntiquot (name : String) (kind : SyntaxNodeKind) (p : ParserDescr)
  | sepBy (p : ParserDescr) (sep : String) (psep : ParserDescr) (allowTrailingSep : Bool)
  | sepBy1 (p : ParserDescr) (sep : String) (psep : ParserDescr) (allowTrailingSep : Bool)
  | unicodeSymbol (val asciiVal : String) (preserveForPP : Bool)
abbrev TrailingParserDescr := ParserDescr
end Lean
namespace Lean.Parser
structure Category
namespace Category
def term : Category := {}
def tactic : Category := {}
def stx : Category := {}
def prec : Category := {}
def prio : Category := {}
def attr : Category := {}
def command : Category := {}
def level : Category := {}
end Category
end Lean.Parser
