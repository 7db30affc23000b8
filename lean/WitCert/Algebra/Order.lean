import WitCert.Algebra.Ring
/-!
# Order: certificates, absolute value, square roots that are never taken

An inequality `x ≤ y` is proved by a certificate: a term `s`, visibly nonnegative, with `y - x = s` by `ring`
(`le_cert`). Equations are used linearly (`eq_lin`). Statements with a square root are written for any `v ≥ 0` with
`u² ≤ v²` (`le_of_sq_le`).
-/
set_option synthInstance.maxSize 4000
universe u
namespace WitCert
variable {α : Type u} [OrderedField α]

theorem sub_nonneg {a b : α} (h : a ≤ b) : 0 ≤ b - a := by
  have h2 : -a + a ≤ -a + b := add_le_add_left (-a) h
  rw [show -a + a = 0 from by ring, show -a + b = b - a from by ring] at h2
  exact h2
theorem le_of_sub_nonneg {a b : α} (h : 0 ≤ b - a) : a ≤ b := by
  have h2 : a + 0 ≤ a + (b - a) := add_le_add_left a h
  rw [show a + 0 = a from by ring, show a + (b - a) = b from by ring] at h2
  exact h2
theorem le_cert {x y s : α} (hs : 0 ≤ s) (h : y - x = s) : x ≤ y :=
  le_of_sub_nonneg (by rw [h]; exact hs)
theorem nonneg_cert {y s : α} (hs : 0 ≤ s) (h : y = s) : 0 ≤ y := by rw [h]; exact hs
/-- linear combination with one equation -/
theorem eq_lin {l r x y : α} (h : l = r) (c : α) (hc : x - y = c * (l - r)) : x = y := by
  rw [h, show c * (r - r) = 0 from by ring] at hc
  exact eq_of_sub_eq_zero hc
theorem mul_congr {a b c d : α} (h₁ : a = b) (h₂ : c = d) : a * c = b * d := by rw [h₁, h₂]
theorem add_congr {a b c d : α} (h₁ : a = b) (h₂ : c = d) : a + c = b + d := by rw [h₁, h₂]
theorem le_of_eq {a b : α} (h : a = b) : a ≤ b := by rw [h]; exact le_refl b
theorem nonneg_mul {a b : α} (ha : 0 ≤ a) (hb : 0 ≤ b) : 0 ≤ a * b := OrderedField.mul_nonneg ha hb
theorem add_nonneg {a b : α} (ha : 0 ≤ a) (hb : 0 ≤ b) : 0 ≤ a + b :=
  le_trans ha (le_cert hb (by ring))
theorem add_le_add {a b c d : α} (h₁ : a ≤ b) (h₂ : c ≤ d) : a + c ≤ b + d :=
  le_cert (add_nonneg (sub_nonneg h₁) (sub_nonneg h₂)) (by ring)
theorem mul_le_mul_left {a b c : α} (hc : 0 ≤ c) (h : a ≤ b) : c * a ≤ c * b :=
  le_cert (nonneg_mul hc (sub_nonneg h)) (by ring)
theorem mul_le_mul_right {a b c : α} (hc : 0 ≤ c) (h : a ≤ b) : a * c ≤ b * c :=
  le_cert (nonneg_mul hc (sub_nonneg h)) (by ring)
theorem mul_le_mul {a b c d : α} (ha : 0 ≤ a) (hd : 0 ≤ d) (h₁ : a ≤ b) (h₂ : c ≤ d) : a * c ≤ b * d :=
  le_trans (mul_le_mul_left ha h₂) (mul_le_mul_right hd h₁)
theorem sq_nonneg (a : α) : 0 ≤ a * a := by
  cases le_total (0 : α) a with
  | inl h => exact nonneg_mul h h
  | inr h => exact nonneg_cert (nonneg_mul (sub_nonneg h) (sub_nonneg h)) (by ring)
theorem zero_le_one : (0 : α) ≤ 1 := nonneg_cert (sq_nonneg 1) (by ring)
theorem zero_le_two : (0 : α) ≤ 2 := nonneg_cert (add_nonneg zero_le_one zero_le_one) (by ring)

theorem le_of_lt {a b : α} (h : a < b) : a ≤ b := (le_total a b).elim id (fun h' => absurd h' h)
theorem lt_irrefl (a : α) : ¬ a < a := fun h => h (le_refl a)
theorem lt_of_lt_of_le {a b c : α} (h₁ : a < b) (h₂ : b ≤ c) : a < c := fun h => h₁ (le_trans h₂ h)
theorem lt_of_le_of_lt {a b c : α} (h₁ : a ≤ b) (h₂ : b < c) : a < c := fun h => h₂ (le_trans h h₁)
theorem ne_of_gt {a b : α} (h : a < b) : b ≠ a := fun e => h (le_of_eq e)
theorem lt_of_le_of_ne {a b : α} (h : a ≤ b) (hne : b ≠ a) : a < b := fun h' => hne (le_antisymm h' h)
theorem le_or_lt (a b : α) : a ≤ b ∨ b < a := (OrderedField.decLe a b).casesOn Or.inr Or.inl
theorem zero_lt_one : (0 : α) < 1 := fun h => zero_ne_one (le_antisymm zero_le_one h)
theorem lt_of_one_le {a : α} (h : 1 ≤ a) : 0 < a := lt_of_lt_of_le zero_lt_one h

theorem mul_inv_cancel {a : α} (h : 0 < a) : a * a⁻¹ = 1 := mul_inv a (ne_of_gt h)
/-- cancel a positive factor -/
theorem nonneg_of_mul {r x : α} (hr : 0 < r) (h : 0 ≤ r * x) : 0 ≤ x := by
  cases le_or_lt 0 x with
  | inl hx => exact hx
  | inr hx =>
    have h0 : r * x = 0 := le_antisymm (le_cert (nonneg_mul (le_of_lt hr) (sub_nonneg (le_of_lt hx))) (by ring)) h
    have e : x = 0 := eq_lin (mul_inv_cancel hr) (-x)
      (eq_lin h0 (-(r⁻¹) + r⁻¹ + r⁻¹) (by ring))
    exact le_of_eq e.symm
theorem le_of_mul_le {r x y : α} (hr : 0 < r) (h : r * x ≤ r * y) : x ≤ y :=
  le_of_sub_nonneg (nonneg_of_mul hr (nonneg_cert (sub_nonneg h) (by ring)))
theorem inv_nonneg {a : α} (h : 0 < a) : 0 ≤ a⁻¹ :=
  nonneg_of_mul h (by rw [mul_inv_cancel h]; exact zero_le_one)
theorem inv_pos {a : α} (h : 0 < a) : 0 < a⁻¹ :=
  lt_of_le_of_ne (inv_nonneg h) (fun e => by
    have h1 := mul_inv_cancel h
    rw [e, show a * 0 = 0 from by ring] at h1
    exact zero_ne_one h1)

/-- absolute value -/
def abs (x : α) : α := if 0 ≤ x then x else -x
theorem abs_cases (x : α) : (0 ≤ x ∧ abs x = x) ∨ (x ≤ 0 ∧ abs x = -x) := by
  show (0 ≤ x ∧ @ite α (0 ≤ x) (OrderedField.decLe 0 x) x (-x) = x) ∨ (x ≤ 0 ∧ @ite α (0 ≤ x) (OrderedField.decLe 0 x) x (-x) = -x)
  cases OrderedField.decLe 0 x with
  | isTrue h => exact Or.inl ⟨h, rfl⟩
  | isFalse h => exact Or.inr ⟨le_of_lt h, rfl⟩
theorem abs_nonneg (x : α) : 0 ≤ abs x := by
  cases abs_cases x with
  | inl h => rw [h.2]; exact h.1
  | inr h => rw [h.2]; exact nonneg_cert (sub_nonneg h.1) (by ring)
theorem le_abs (x : α) : x ≤ abs x := by
  cases abs_cases x with
  | inl h => exact le_of_eq h.2.symm
  | inr h => exact le_trans h.1 (abs_nonneg x)
theorem neg_le_abs (x : α) : -x ≤ abs x := by
  cases abs_cases x with
  | inl h => exact le_trans (le_cert h.1 (by ring)) (abs_nonneg x)
  | inr h => exact le_of_eq h.2.symm
theorem abs_le {x y : α} (h₁ : x ≤ y) (h₂ : -x ≤ y) : abs x ≤ y := by
  cases abs_cases x with
  | inl h => rw [h.2]; exact h₁
  | inr h => rw [h.2]; exact h₂
theorem abs_mul_self (x : α) : abs x * abs x = x * x := by
  cases abs_cases x with
  | inl h => rw [h.2]
  | inr h => rw [h.2]; exact ring_eq rfl
theorem abs_of_nonneg {x : α} (h : 0 ≤ x) : abs x = x :=
  le_antisymm (abs_le (le_refl x) (le_cert (add_nonneg h h) (by ring))) (le_abs x)
theorem abs_add (x y : α) : abs (x + y) ≤ abs x + abs y :=
  abs_le (add_le_add (le_abs x) (le_abs y))
    (le_trans (le_of_eq (by ring)) (add_le_add (neg_le_abs x) (neg_le_abs y)))
theorem abs_mul_nonneg {c : α} (hc : 0 ≤ c) (x : α) : abs (c * x) = c * abs x := by
  cases abs_cases x with
  | inl h => rw [h.2]; exact abs_of_nonneg (nonneg_mul hc h.1)
  | inr h =>
    rw [h.2]
    exact le_antisymm
      (abs_le (le_cert (nonneg_mul hc (nonneg_cert (add_nonneg (sub_nonneg h.1) (sub_nonneg h.1)) rfl)) (by ring)) (le_of_eq (by ring)))
      (le_trans (le_of_eq (by ring)) (neg_le_abs (c * x)))
theorem abs_neg (x : α) : abs (-x) = abs x :=
  le_antisymm (abs_le (neg_le_abs x) (le_trans (le_of_eq (by ring)) (le_abs x)))
    (abs_le (le_trans (le_of_eq (by ring)) (neg_le_abs (-x))) (le_abs (-x)))
theorem abs_mul (c x : α) : abs (c * x) = abs c * abs x := by
  cases abs_cases c with
  | inl h => rw [h.2]; exact abs_mul_nonneg h.1 x
  | inr h =>
    rw [h.2, ← abs_mul_nonneg (nonneg_cert (sub_nonneg h.1) (by ring)), ← abs_neg]
    exact congrArg abs (by ring)
theorem le_of_sq_le {u v : α} (hv : 0 ≤ v) (h : u * u ≤ v * v) : u ≤ v := by
  cases le_or_lt u v with
  | inl h1 => exact h1
  | inr h1 =>
    have hu : 0 < u := lt_of_le_of_lt hv h1
    -- (u+v)(u-v) ≤ 0 with u+v > 0 gives u ≤ v
    have hs : 0 < u + v := lt_of_lt_of_le hu (le_cert hv (by ring))
    exact le_of_mul_le hs (le_cert (sub_nonneg h) (by ring))
theorem abs_le_of_sq_le {u v : α} (hv : 0 ≤ v) (h : u * u ≤ v * v) : abs u ≤ v :=
  le_of_sq_le hv (by rw [abs_mul_self]; exact h)
/-- a·r ≥ 1, r > 0 ⇒ 2A ≤ A²a + r (AM–GM in tangent form) -/
theorem tangent {a r : α} (A : α) (hr : 0 < r) (h : 1 ≤ r * a) : 2 * A ≤ A * A * a + r :=
  le_of_mul_le hr (le_cert (add_nonneg (sq_nonneg (A - r)) (nonneg_mul (sq_nonneg A) (sub_nonneg h))) (by ring))
theorem two_le {a r : α} (hr : 0 < r) (h : 1 ≤ r * a) : 2 ≤ a + r := by
  have h2 := tangent 1 hr h
  rw [show (2 : α) * 1 = 2 from by ring, show 1 * 1 * a + r = a + r from by ring] at h2
  exact h2


/-! ### Strict inequalities, division, natural numbers -/

theorem lt_cert {x y s : α} (hs : 0 < s) (h : y - x = s) : x < y := fun hc =>
  hs (by rw [← h]; exact le_cert (sub_nonneg hc) (by ring))
theorem mul_pos {a b : α} (ha : 0 < a) (hb : 0 < b) : 0 < a * b := fun hc => by
  have h : a * b ≤ a * 0 := le_trans hc (le_of_eq (by ring))
  exact hb (le_of_mul_le ha h)
theorem add_pos {a b : α} (ha : 0 < a) (hb : 0 ≤ b) : 0 < a + b := lt_of_lt_of_le ha (le_cert hb (by ring))
theorem add_pos' {a b : α} (ha : 0 ≤ a) (hb : 0 < b) : 0 < a + b := lt_of_lt_of_le hb (le_cert ha (by ring))
theorem pos_of_sub {a b : α} (h : a < b) : 0 < b - a := fun hc => h (le_cert (sub_nonneg hc) (by ring))
theorem zero_lt_two : (0 : α) < 2 := lt_of_lt_of_le zero_lt_one (le_cert zero_le_one (by ring))
theorem two_half : (2 : α) * 2⁻¹ = 1 := mul_inv_cancel zero_lt_two
theorem half_nonneg : (0 : α) ≤ 2⁻¹ := inv_nonneg zero_lt_two
theorem half_add (x : α) : 2⁻¹ * x + 2⁻¹ * x = x := eq_lin two_half x (by ring)
theorem div_mul_cancel {a b : α} (hb : 0 < b) : a / b * b = a := eq_lin (mul_inv_cancel hb) a (by ring)
theorem mul_div_cancel {a b : α} (hb : 0 < b) : b * (a / b) = a := eq_lin (mul_inv_cancel hb) a (by ring)
theorem le_div {x a b : α} (hb : 0 < b) (h : x * b ≤ a) : x ≤ a / b :=
  le_of_mul_le hb (le_trans (le_of_eq (mul_comm b x)) (le_trans h (le_of_eq (mul_div_cancel hb).symm)))
theorem div_le {x a b : α} (hb : 0 < b) (h : a ≤ x * b) : a / b ≤ x :=
  le_of_mul_le hb (le_trans (le_of_eq (mul_div_cancel hb)) (le_trans h (le_of_eq (mul_comm x b))))
theorem mul_le_of_le_div {x a b : α} (hb : 0 < b) (h : x ≤ a / b) : x * b ≤ a :=
  le_trans (mul_le_mul_right (le_of_lt hb) h) (le_of_eq (div_mul_cancel hb))
theorem div_nonneg {a b : α} (ha : 0 ≤ a) (hb : 0 < b) : 0 ≤ a / b :=
  nonneg_cert (nonneg_mul ha (inv_nonneg hb)) (div_eq a b)
theorem eq_div {x a b : α} (hb : 0 < b) (h : x * b = a) : x = a / b :=
  le_antisymm (le_div hb (le_of_eq h)) (div_le hb (le_of_eq h.symm))
theorem eq_lin2 {l₁ r₁ l₂ r₂ x y : α} (h₁ : l₁ = r₁) (h₂ : l₂ = r₂) (c₁ c₂ : α)
    (hc : x - y = c₁ * (l₁ - r₁) + c₂ * (l₂ - r₂)) : x = y :=
  eq_lin h₁ c₁ (eq_lin h₂ c₂ (by rw [hc]; ring))
theorem eq_lin3 {l₁ r₁ l₂ r₂ l₃ r₃ x y : α} (h₁ : l₁ = r₁) (h₂ : l₂ = r₂) (h₃ : l₃ = r₃) (c₁ c₂ c₃ : α)
    (hc : x - y = c₁ * (l₁ - r₁) + c₂ * (l₂ - r₂) + c₃ * (l₃ - r₃)) : x = y :=
  eq_lin2 h₁ h₂ c₁ c₂ (eq_lin h₃ c₃ (by rw [hc]; ring))
theorem ofNat_nonneg (n : Nat) : (0 : α) ≤ ofNat n := by
  induction n with
  | zero => exact le_refl 0
  | succ n ih => rw [ofNat_succ]; exact add_nonneg ih zero_le_one
theorem ofNat_succ_pos (n : Nat) : (0 : α) < ofNat n + 1 :=
  lt_of_lt_of_le zero_lt_one (le_cert (ofNat_nonneg n) (by ring))

/-- The smaller of two numbers. -/
def min (x y : α) : α := if x ≤ y then x else y
theorem min_cases (x y : α) : (x ≤ y ∧ min x y = x) ∨ (y ≤ x ∧ min x y = y) := by
  show (x ≤ y ∧ @ite α (x ≤ y) (OrderedField.decLe x y) x y = x) ∨ (y ≤ x ∧ @ite α (x ≤ y) (OrderedField.decLe x y) x y = y)
  cases OrderedField.decLe x y with
  | isTrue h => exact Or.inl ⟨h, rfl⟩
  | isFalse h => exact Or.inr ⟨le_of_lt h, rfl⟩
theorem min_le_left (x y : α) : min x y ≤ x := by
  cases min_cases x y with
  | inl h => exact le_of_eq h.2
  | inr h => rw [h.2]; exact h.1
theorem min_le_right (x y : α) : min x y ≤ y := by
  cases min_cases x y with
  | inl h => rw [h.2]; exact h.1
  | inr h => exact le_of_eq h.2
theorem le_min {x y z : α} (h₁ : z ≤ x) (h₂ : z ≤ y) : z ≤ min x y := by
  cases min_cases x y with
  | inl h => rw [h.2]; exact h₁
  | inr h => rw [h.2]; exact h₂
end WitCert
