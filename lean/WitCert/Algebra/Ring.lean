import WitCert.Algebra.Field
/-!
# A normaliser for identities of commutative rings

`by ring` proves any identity between polynomials (numerals listed below, `+`, `-`, `*`, unary `-`, `/`; an inverse `b⁻¹` is an
atom). Terms are read into the syntax `Ring.Ex` by type-class search and compared by computation: `Ring.norm` writes
an expression as a sum of monomials with integer coefficients, `Ring.check_sound` says that equal normal forms mean
equal values. Inequalities then reduce to certificates, see `WitCert.Algebra.Order`.
-/
set_option synthInstance.maxSize 4000
universe u
namespace WitCert
namespace Ring
/-- Syntax of polynomial expressions over numbered atoms. -/
inductive Ex where
  | var (i : Nat)
  | num (n : Nat)
  | add (a b : Ex)
  | sub (a b : Ex)
  | mul (a b : Ex)
  | neg (a : Ex)

/-- A monomial `(p - n) · x_{m₁} · x_{m₂} ⋯`; the list `m` is sorted. -/
structure Tm where
  p : Nat
  n : Nat
  m : List Nat

def insV (v : Nat) : List Nat → List Nat
  | .nil => .cons v .nil
  | .cons x xs => cond (Nat.ble v x) (.cons v (.cons x xs)) (.cons x (insV v xs))
def mulM : List Nat → List Nat → List Nat
  | .nil, ys => ys
  | .cons x xs, ys => insV x (mulM xs ys)
def eqM : List Nat → List Nat → Bool
  | .nil, .nil => true
  | .cons x xs, .cons y ys => cond (Nat.beq x y) (eqM xs ys) false
  | .nil, .cons _ _ => false
  | .cons _ _, .nil => false
def addT (p n : Nat) (m : List Nat) : List Tm → List Tm
  | .nil => .cons ⟨p, n, m⟩ .nil
  | .cons t ts => cond (eqM m t.m) (.cons ⟨p + t.p, n + t.n, t.m⟩ ts) (.cons t (addT p n m ts))
def addP : List Tm → List Tm → List Tm
  | .nil, q => q
  | .cons t ts, q => addT t.p t.n t.m (addP ts q)
def mulT (p n : Nat) (m : List Nat) : List Tm → List Tm
  | .nil => .nil
  | .cons t ts => addT (p * t.p + n * t.n) (p * t.n + n * t.p) (mulM m t.m) (mulT p n m ts)
def mulP : List Tm → List Tm → List Tm
  | .nil, _ => .nil
  | .cons t ts, q => addP (mulT t.p t.n t.m q) (mulP ts q)
def negP : List Tm → List Tm
  | .nil => .nil
  | .cons t ts => .cons ⟨t.n, t.p, t.m⟩ (negP ts)
def isZ : List Tm → Bool
  | .nil => true
  | .cons t ts => cond (Nat.beq t.p t.n) (isZ ts) false
/-- Normal form: a sum of monomials, each list of atoms occurring once. -/
def norm : Ex → List Tm
  | .var i => .cons ⟨1, 0, .cons i .nil⟩ .nil
  | .num n => .cons ⟨n, 0, .nil⟩ .nil
  | .add a b => addP (norm a) (norm b)
  | .sub a b => addP (norm a) (negP (norm b))
  | .mul a b => mulP (norm a) (norm b)
  | .neg a => negP (norm a)
/-- `a - b` normalises to zero. -/
def check (a b : Ex) : Bool := isZ (norm (.sub a b))

section
open OrderedField (zero one)
variable {α : Type u} [OrderedField α]
/-- Value of the atom numbered by the second argument. -/
def nth : List α → Nat → α
  | .nil, _ => zero
  | .cons x _, .zero => x
  | .cons _ xs, .succ n => nth xs n
def eval (env : List α) : Ex → α
  | .var i => nth env i
  | .num n => ofNat n
  | .add a b => eval env a + eval env b
  | .sub a b => eval env a - eval env b
  | .mul a b => eval env a * eval env b
  | .neg a => -(eval env a)
def evM (env : List α) : List Nat → α
  | .nil => one
  | .cons x xs => nth env x * evM env xs
def evT (env : List α) (t : Tm) : α := (ofNat t.p + -(ofNat t.n)) * evM env t.m
def evP (env : List α) : List Tm → α
  | .nil => zero
  | .cons t ts => evT env t + evP env ts

theorem evM_insV (env : List α) (v : Nat) (m : List Nat) : evM env (insV v m) = nth env v * evM env m := by
  induction m with
  | nil => rfl
  | cons x xs ih =>
    show evM env (cond (Nat.ble v x) _ _) = _
    cases Nat.ble v x with
    | true => rfl
    | false =>
      show nth env x * evM env (insV v xs) = nth env v * (nth env x * evM env xs)
      rw [ih, mul_left_comm]
theorem evM_mulM (env : List α) (a b : List Nat) : evM env (mulM a b) = evM env a * evM env b := by
  induction a with
  | nil => exact (one_mul _).symm
  | cons x xs ih =>
    show evM env (insV x (mulM xs b)) = nth env x * evM env xs * evM env b
    rw [evM_insV, ih, mul_assoc]
theorem eqM_sound (a b : List Nat) (h : eqM a b = true) : a = b := by
  induction a generalizing b with
  | nil => cases b with
    | nil => rfl
    | cons y ys => exact Bool.noConfusion h
  | cons x xs ih => cases b with
    | nil => exact Bool.noConfusion h
    | cons y ys =>
      have h1 : Nat.beq x y = true := by
        revert h
        show cond (Nat.beq x y) _ _ = true → _
        cases Nat.beq x y with
        | true => intro _; rfl
        | false => intro h; exact Bool.noConfusion h
      have h2 : eqM xs ys = true := by
        revert h
        show cond (Nat.beq x y) _ _ = true → _
        rw [h1]
        intro h
        exact h
      rw [Nat.eq_of_beq_eq_true h1, ih ys h2]
theorem coef_add (p n p' n' : Nat) :
    (ofNat (p + p') + -(ofNat (n + n')) : α) = (ofNat p + -(ofNat n)) + (ofNat p' + -(ofNat n')) := by
  rw [ofNat_add, ofNat_add, neg_add, add_assoc, add_assoc, add_left_comm (ofNat p')]
theorem coef_mul (p n p' n' : Nat) :
    (ofNat (p * p' + n * n') + -(ofNat (p * n' + n * p')) : α)
      = (ofNat p + -(ofNat n)) * (ofNat p' + -(ofNat n')) := by
  rw [ofNat_add, ofNat_add, ofNat_mul, ofNat_mul, ofNat_mul, ofNat_mul, add_mul, mul_add, mul_add, mul_neg, neg_mul, neg_mul,
    mul_neg, neg_neg, neg_add, add_assoc, add_assoc, add_left_comm (ofNat n * ofNat n'),
    add_comm (ofNat n * ofNat n')]
theorem evP_addT (env : List α) (p n : Nat) (m : List Nat) (q : List Tm) :
    evP env (addT p n m q) = (ofNat p + -(ofNat n)) * evM env m + evP env q := by
  induction q with
  | nil => rfl
  | cons t ts ih =>
    show evP env (cond (eqM m t.m) _ _) = _
    have hc : ∀ b : Bool, eqM m t.m = b → evP env (cond b (.cons ⟨p + t.p, n + t.n, t.m⟩ ts) (.cons t (addT p n m ts)))
        = (ofNat p + -(ofNat n)) * evM env m + evP env (.cons t ts) := by
      intro b hb
      cases b with
      | true =>
        have e := eqM_sound _ _ hb
        show (ofNat (p + t.p) + -(ofNat (n + t.n))) * evM env t.m + evP env ts
          = (ofNat p + -(ofNat n)) * evM env m + ((ofNat t.p + -(ofNat t.n)) * evM env t.m + evP env ts)
        rw [e, coef_add, add_mul, add_assoc]
      | false =>
        show evT env t + evP env (addT p n m ts) = _ + (evT env t + evP env ts)
        rw [ih, add_left_comm]
    exact hc _ rfl
theorem evP_addP (env : List α) (a b : List Tm) : evP env (addP a b) = evP env a + evP env b := by
  induction a with
  | nil => exact (zero_add _).symm
  | cons t ts ih =>
    show evP env (addT t.p t.n t.m (addP ts b)) = evT env t + evP env ts + evP env b
    rewrite [evP_addT, ih, ← add_assoc]
    rfl
theorem mulT_aux (c t m s e : α) : c * t * (m * s) + c * m * e = c * m * (t * s + e) := by
  rw [mul_add, mul_assoc, mul_left_comm t m s, mul_assoc c m (t * s)]
theorem evP_mulT (env : List α) (p n : Nat) (m : List Nat) (q : List Tm) :
    evP env (mulT p n m q) = (ofNat p + -(ofNat n)) * evM env m * evP env q := by
  induction q with
  | nil => exact (mul_zero _).symm
  | cons t ts ih =>
    show evP env (addT _ _ _ (mulT p n m ts)) = _ * ((ofNat t.p + -(ofNat t.n)) * evM env t.m + evP env ts)
    rw [evP_addT, ih, coef_mul, evM_mulM]
    exact mulT_aux _ _ _ _ _
theorem evP_mulP (env : List α) (a b : List Tm) : evP env (mulP a b) = evP env a * evP env b := by
  induction a with
  | nil => exact (zero_mul _).symm
  | cons t ts ih =>
    show evP env (addP (mulT t.p t.n t.m b) (mulP ts b)) = (evT env t + evP env ts) * evP env b
    rewrite [evP_addP, evP_mulT, ih, add_mul (evT env t)]
    rfl
theorem evP_negP (env : List α) (a : List Tm) : evP env (negP a) = -(evP env a) := by
  induction a with
  | nil => exact neg_zero.symm
  | cons t ts ih =>
    show (ofNat t.n + -(ofNat t.p)) * evM env t.m + evP env (negP ts)
      = -((ofNat t.p + -(ofNat t.n)) * evM env t.m + evP env ts)
    rw [ih, neg_add, ← neg_mul, neg_add, neg_neg, add_comm (ofNat t.n)]
theorem evP_isZ (env : List α) (a : List Tm) (h : isZ a = true) : evP env a = zero := by
  induction a with
  | nil => rfl
  | cons t ts ih =>
    have h1 : Nat.beq t.p t.n = true := by
      revert h
      show cond (Nat.beq t.p t.n) _ _ = true → _
      cases Nat.beq t.p t.n with
      | true => intro _; rfl
      | false => intro h; exact Bool.noConfusion h
    have h2 : isZ ts = true := by
      revert h
      show cond (Nat.beq t.p t.n) _ _ = true → _
      rw [h1]
      intro h
      exact h
    show (ofNat t.p + -(ofNat t.n)) * evM env t.m + evP env ts = zero
    rw [ih h2, Nat.eq_of_beq_eq_true h1, add_neg, zero_mul, add_zero]
theorem evP_norm (env : List α) (e : Ex) : evP env (norm e) = eval env e := by
  induction e with
  | var i =>
    show (one + -zero) * (nth env i * one) + zero = nth env i
    rw [neg_zero, add_zero, add_zero, mul_one, one_mul]
  | num n =>
    show (ofNat n + -zero) * one + zero = ofNat n
    rw [neg_zero, add_zero, add_zero, mul_one]
  | add a b iha ihb =>
    show evP env (addP _ _) = eval env a + eval env b
    rw [evP_addP, iha, ihb]
  | sub a b iha ihb =>
    show evP env (addP _ (negP _)) = eval env a - eval env b
    rw [evP_addP, evP_negP, iha, ihb, sub_eq]
  | mul a b iha ihb =>
    show evP env (mulP _ _) = eval env a * eval env b
    rw [evP_mulP, iha, ihb]
  | neg a iha =>
    show evP env (negP _) = -(eval env a)
    rw [evP_negP, iha]
/-- **Soundness of the normaliser.** -/
theorem check_sound (env : List α) (a b : Ex) (h : check a b = true) : eval env a = eval env b :=
  eq_of_sub_eq_zero (((evP_norm env (.sub a b)).symm.trans (evP_isZ env _ h)))

end

/-! Reading terms by type-class search: `Idx` looks an atom up, `Atoms` collects atoms, `Reify` reads. -/
section
variable {α : Type u} [OrderedField α]
class Idx (env : List α) (x : α) (n : outParam Nat) : Prop where
  eq : nth env n = x
instance idxHere (env : List α) (x : α) : Idx (.cons x env) x 0 := ⟨rfl⟩
instance (priority := 500) idxThere (env : List α) (x y : α) (n : Nat) [h : Idx env x n] :
    Idx (.cons y env) x (Nat.succ n) := ⟨h.eq⟩

class Atoms (env : List α) (x : α) (env' : outParam (List α)) : Prop where
  ok : True
instance (env : List α) : Atoms env (0 : α) env := ⟨True.intro⟩
instance (env : List α) : Atoms env (1 : α) env := ⟨True.intro⟩
instance (env : List α) : Atoms env (2 : α) env := ⟨True.intro⟩
instance (env : List α) : Atoms env (3 : α) env := ⟨True.intro⟩
instance (env : List α) : Atoms env (4 : α) env := ⟨True.intro⟩
instance (env : List α) : Atoms env (5 : α) env := ⟨True.intro⟩
instance (env : List α) : Atoms env (6 : α) env := ⟨True.intro⟩
instance (env : List α) : Atoms env (8 : α) env := ⟨True.intro⟩
instance (env : List α) : Atoms env (9 : α) env := ⟨True.intro⟩
instance (env : List α) : Atoms env (10 : α) env := ⟨True.intro⟩
instance (env : List α) : Atoms env (12 : α) env := ⟨True.intro⟩
instance (env : List α) : Atoms env (16 : α) env := ⟨True.intro⟩
instance atomsAdd (e₁ e₂ e₃ : List α) (a b : α) [Atoms e₁ a e₂] [Atoms e₂ b e₃] : Atoms e₁ (a + b) e₃ := ⟨True.intro⟩
instance atomsSub (e₁ e₂ e₃ : List α) (a b : α) [Atoms e₁ a e₂] [Atoms e₂ b e₃] : Atoms e₁ (a - b) e₃ := ⟨True.intro⟩
instance atomsMul (e₁ e₂ e₃ : List α) (a b : α) [Atoms e₁ a e₂] [Atoms e₂ b e₃] : Atoms e₁ (a * b) e₃ := ⟨True.intro⟩
instance atomsDiv (e₁ e₂ e₃ : List α) (a b : α) [Atoms e₁ a e₂] [Atoms e₂ b⁻¹ e₃] : Atoms e₁ (a / b) e₃ := ⟨True.intro⟩
instance atomsNeg (e₁ e₂ : List α) (a : α) [Atoms e₁ a e₂] : Atoms e₁ (-a) e₂ := ⟨True.intro⟩
instance (priority := 200) atomsOld (env : List α) (x : α) (n : Nat) [Idx env x n] : Atoms env x env := ⟨True.intro⟩
instance (priority := 100) atomsNew (env : List α) (x : α) : Atoms env x (.cons x env) := ⟨True.intro⟩

class Reify (env : List α) (x : α) (e : outParam Ex) : Prop where
  eq : eval env e = x
instance (env : List α) : Reify env (0 : α) (.num 0) := ⟨rfl⟩
instance (env : List α) : Reify env (1 : α) (.num 1) := ⟨rfl⟩
instance (env : List α) : Reify env (2 : α) (.num 2) := ⟨rfl⟩
instance (env : List α) : Reify env (3 : α) (.num 3) := ⟨rfl⟩
instance (env : List α) : Reify env (4 : α) (.num 4) := ⟨rfl⟩
instance (env : List α) : Reify env (5 : α) (.num 5) := ⟨rfl⟩
instance (env : List α) : Reify env (6 : α) (.num 6) := ⟨rfl⟩
instance (env : List α) : Reify env (8 : α) (.num 8) := ⟨rfl⟩
instance (env : List α) : Reify env (9 : α) (.num 9) := ⟨rfl⟩
instance (env : List α) : Reify env (10 : α) (.num 10) := ⟨rfl⟩
instance (env : List α) : Reify env (12 : α) (.num 12) := ⟨rfl⟩
instance (env : List α) : Reify env (16 : α) (.num 16) := ⟨rfl⟩
instance reAdd (env : List α) (a b : α) (x y : Ex) [ha : Reify env a x] [hb : Reify env b y] :
    Reify env (a + b) (.add x y) := ⟨by rewrite [← ha.eq, ← hb.eq]; rfl⟩
instance reSub (env : List α) (a b : α) (x y : Ex) [ha : Reify env a x] [hb : Reify env b y] :
    Reify env (a - b) (.sub x y) := ⟨by rewrite [← ha.eq, ← hb.eq]; rfl⟩
instance reMul (env : List α) (a b : α) (x y : Ex) [ha : Reify env a x] [hb : Reify env b y] :
    Reify env (a * b) (.mul x y) := ⟨by rewrite [← ha.eq, ← hb.eq]; rfl⟩
instance reDiv (env : List α) (a b : α) (x y : Ex) [ha : Reify env a x] [hb : Reify env b⁻¹ y] :
    Reify env (a / b) (.mul x y) := ⟨by rewrite [div_eq, ← ha.eq, ← hb.eq]; rfl⟩
instance reNeg (env : List α) (a : α) (x : Ex) [ha : Reify env a x] : Reify env (-a) (.neg x) :=
  ⟨by rewrite [← ha.eq]; rfl⟩
instance (priority := 100) reAtom (env : List α) (x : α) (n : Nat) [h : Idx env x n] : Reify env x (.var n) := ⟨h.eq⟩
end
end Ring

variable {α : Type u} [OrderedField α]
/-- Any identity of commutative rings: `ring_eq rfl : x = y`. -/
theorem ring_eq {x y : α} {e₁ e₂ : List α} {a b : Ring.Ex} [Ring.Atoms .nil x e₁] [Ring.Atoms e₁ y e₂]
    [ha : Ring.Reify e₂ x a] [hb : Ring.Reify e₂ y b] (h : Ring.check a b = true) : x = y :=
  ha.eq.symm.trans ((Ring.check_sound e₂ a b h).trans hb.eq)

/-- Close a goal that is an identity of commutative rings. -/
macro "ring" : tactic => `(tactic| exact WitCert.ring_eq rfl)

example (a b : α) : (a + b) * (a + b) = a * a + 2 * a * b + b * b := by ring
example (a b c : α) : (a - 12 * b) / c = -(12 * b) / c + a * c⁻¹ := by ring
end WitCert
