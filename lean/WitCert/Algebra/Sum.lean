import WitCert.Algebra.Order
/-!
# Finite sums over a list of indices, and Cauchy–Schwarz

Hypotheses are stated for all indices of the (arbitrary) index type, so a list may repeat an index.
-/
set_option synthInstance.maxSize 4000
universe u v w
namespace WitCert
variable {α : Type u} [OrderedField α] {ι : Type v} {κ : Type w}

/-- `sum f l = Σ_{i ∈ l} f i`. -/
def sum (f : ι → α) : List ι → α
  | .nil => 0
  | .cons i l => f i + sum f l

theorem sum_congr {f g : ι → α} (l : List ι) (h : ∀ i, f i = g i) : sum f l = sum g l := by
  induction l with
  | nil => rfl
  | cons i l ih => show f i + sum f l = g i + sum g l; rw [h i, ih]
theorem sum_le {f g : ι → α} (l : List ι) (h : ∀ i, f i ≤ g i) : sum f l ≤ sum g l := by
  induction l with
  | nil => exact le_refl 0
  | cons i l ih => exact add_le_add (h i) ih
theorem sum_nonneg {f : ι → α} (l : List ι) (h : ∀ i, 0 ≤ f i) : 0 ≤ sum f l := by
  induction l with
  | nil => exact le_refl 0
  | cons i l ih => exact add_nonneg (h i) ih
/-- `p` holds for every element of a list. -/
def AllOf (p : ι → Prop) : List ι → Prop
  | .nil => True
  | .cons i l => p i ∧ AllOf p l
theorem sum_le_all {f g : ι → α} (l : List ι) (h : AllOf (fun i => f i ≤ g i) l) : sum f l ≤ sum g l := by
  induction l with
  | nil => exact le_refl 0
  | cons i l ih => exact add_le_add h.1 (ih h.2)
theorem sum_congr_all {f g : ι → α} (l : List ι) (h : AllOf (fun i => f i = g i) l) : sum f l = sum g l := by
  induction l with
  | nil => rfl
  | cons i l ih => exact add_congr h.1 (ih h.2)
/-- Membership of a value `f i` in the image of a list. -/
def InImage (f : ι → α) (v : α) : List ι → Prop
  | .nil => False
  | .cons i l => f i = v ∨ InImage f v l
theorem AllOf.imp {p q : ι → Prop} (l : List ι) (hpq : ∀ i, p i → q i) (h : AllOf p l) : AllOf q l := by
  induction l with
  | nil => exact True.intro
  | cons i l ih => exact ⟨hpq i h.1, ih h.2⟩
omit [OrderedField α] in
theorem allOf_inImage (f : ι → α) (l : List ι) : AllOf (fun i => InImage f (f i) l) l := by
  induction l with
  | nil => exact True.intro
  | cons i l ih => exact ⟨Or.inl rfl, AllOf.imp l (fun _ h => Or.inr h) ih⟩
theorem sum_lin2 (c d : α) (f g : ι → α) (l : List ι) :
    sum (fun i => c * f i + d * g i) l = c * sum f l + d * sum g l := by
  induction l with
  | nil => show (0 : α) = c * 0 + d * 0; ring
  | cons i l ih =>
    show c * f i + d * g i + sum _ l = c * (f i + sum f l) + d * (g i + sum g l)
    rw [ih]; ring
theorem sum_lin3 (c d e : α) (f g h : ι → α) (l : List ι) :
    sum (fun i => c * f i + d * g i + e * h i) l = c * sum f l + d * sum g l + e * sum h l := by
  induction l with
  | nil => show (0 : α) = c * 0 + d * 0 + e * 0; ring
  | cons i l ih =>
    show c * f i + d * g i + e * h i + sum _ l = c * (f i + sum f l) + d * (g i + sum g l) + e * (h i + sum h l)
    rw [ih]; ring
theorem sum_mul (c : α) (f : ι → α) (l : List ι) : sum (fun i => c * f i) l = c * sum f l := by
  induction l with
  | nil => show (0 : α) = c * 0; ring
  | cons i l ih =>
    show c * f i + sum _ l = c * (f i + sum f l)
    rw [ih]; ring
theorem abs_sum_le (f : ι → α) (l : List ι) : abs (sum f l) ≤ sum (fun i => abs (f i)) l := by
  induction l with
  | nil => exact le_of_eq (abs_of_nonneg (le_refl 0))
  | cons i l ih => exact le_trans (abs_add _ _) (add_le_add (le_refl _) ih)
theorem cs_step {S X Y v p q : α} (ih : S * S ≤ X * Y) (hX : 0 ≤ X) (hY : 0 ≤ Y) (hv : 0 ≤ v) :
    (v * (p * q) + S) * (v * (p * q) + S) ≤ (v * (p * p) + X) * (v * (q * q) + Y) := by
  have h0 : 0 ≤ p * p * Y + q * q * X := add_nonneg (nonneg_mul (sq_nonneg p) hY) (nonneg_mul (sq_nonneg q) hX)
  have h4 : (0 : α) ≤ 4 := nonneg_cert (add_nonneg zero_le_two zero_le_two) (by ring)
  have hu : 2 * p * q * S ≤ p * p * Y + q * q * X := le_of_sq_le h0
    (le_cert (add_nonneg (nonneg_mul (nonneg_mul h4 (sq_nonneg (p * q))) (sub_nonneg ih))
      (sq_nonneg (p * p * Y - q * q * X))) (by ring))
  exact le_cert (add_nonneg (sub_nonneg ih) (nonneg_mul hv (sub_nonneg hu))) (by ring)
/-- Cauchy–Schwarz with weights `w ≥ 0`: `(Σ w x y)² ≤ (Σ w x²)(Σ w y²)`. -/
theorem cauchy_schwarz_w {w : ι → α} (hw : ∀ i, 0 ≤ w i) (x y : ι → α) (l : List ι) :
    sum (fun i => w i * (x i * y i)) l * sum (fun i => w i * (x i * y i)) l
      ≤ sum (fun i => w i * (x i * x i)) l * sum (fun i => w i * (y i * y i)) l := by
  induction l with
  | nil => exact le_refl _
  | cons i l ih =>
    exact cs_step ih (sum_nonneg l (fun i => nonneg_mul (hw i) (sq_nonneg _))) (sum_nonneg l (fun i => nonneg_mul (hw i) (sq_nonneg _))) (hw i)
/-- **Cauchy–Schwarz.** `(Σ x y)² ≤ (Σ x²)(Σ y²)`: the inequality behind every band of the witness.

Code: `witcert_core.cache.radii.radius_witness`.
`python: dot(q, d) ** 2 <= dot(q, q) * dot(d, d)` -/
theorem cauchy_schwarz (x y : ι → α) (l : List ι) :
    sum (fun i => x i * y i) l * sum (fun i => x i * y i) l
      ≤ sum (fun i => x i * x i) l * sum (fun i => y i * y i) l := by
  have h := cauchy_schwarz_w (w := fun _ => (1 : α)) (fun _ => zero_le_one) x y l
  rw [sum_congr l (g := fun i => x i * y i) (fun i => by ring), sum_congr l (f := fun i => 1 * (x i * x i)) (g := fun i => x i * x i) (fun i => by ring),
    sum_congr l (f := fun i => 1 * (y i * y i)) (g := fun i => y i * y i) (fun i => by ring)] at h
  exact h
/-- `(Σ v)² ≤ (Σ v a)(Σ v r)` when `a r ≥ 1`: the step that replaces `Σ p̃ e^{-c}` by a mass. -/
theorem sum_sq_le_of_one_le_mul {v a r : ι → α} (hv : ∀ i, 0 ≤ v i) (ha : ∀ i, 0 ≤ a i) (hr : ∀ i, 0 ≤ r i)
    (har : ∀ i, 1 ≤ r i * a i) (l : List ι) :
    sum v l * sum v l ≤ sum (fun i => v i * a i) l * sum (fun i => v i * r i) l := by
  induction l with
  | nil => exact le_refl _
  | cons i l ih =>
    show (v i + sum v l) * (v i + sum v l) ≤ (v i * a i + sum (fun i => v i * a i) l) * (v i * r i + sum (fun i => v i * r i) l)
    have hP : 0 ≤ sum (fun i => v i * a i) l := sum_nonneg l (fun i => nonneg_mul (hv i) (ha i))
    have hR : 0 ≤ sum (fun i => v i * r i) l := sum_nonneg l (fun i => nonneg_mul (hv i) (hr i))
    have h4 : (0 : α) ≤ 4 := nonneg_cert (add_nonneg zero_le_two zero_le_two) (by ring)
    have hu : 2 * sum v l ≤ a i * sum (fun i => v i * r i) l + r i * sum (fun i => v i * a i) l :=
      le_of_sq_le (add_nonneg (nonneg_mul (ha i) hR) (nonneg_mul (hr i) hP))
        (le_cert (add_nonneg (add_nonneg (nonneg_mul h4 (sub_nonneg ih)) (nonneg_mul (nonneg_mul h4 (sub_nonneg (har i))) (nonneg_mul hP hR)))
          (sq_nonneg (a i * sum (fun i => v i * r i) l - r i * sum (fun i => v i * a i) l))) (by ring))
    exact le_cert (add_nonneg (add_nonneg (sub_nonneg ih) (nonneg_mul (hv i) (sub_nonneg hu)))
      (nonneg_mul (nonneg_mul (hv i) (hv i)) (sub_nonneg (har i)))) (by ring)
theorem sum_const_mul (c : α) (l : List ι) : sum (fun _ => c) l = c * sum (fun _ => 1) l :=
  (sum_congr l (g := fun _ => c * 1) (fun _ => by ring)).trans (sum_mul c (fun _ => 1) l)
theorem sum_add (f g : ι → α) (l : List ι) : sum (fun i => f i + g i) l = sum f l + sum g l :=
  (sum_congr l (g := fun i => 1 * f i + 1 * g i) (fun _ => by ring)).trans ((sum_lin2 1 1 f g l).trans (by ring))
theorem sum_sub (f g : ι → α) (l : List ι) : sum (fun i => f i - g i) l = sum f l - sum g l :=
  (sum_congr l (g := fun i => 1 * f i + -1 * g i) (fun _ => by ring)).trans ((sum_lin2 1 (-1) f g l).trans (by ring))
theorem sum_zero (l : List ι) : sum (fun _ => (0 : α)) l = 0 := (sum_const_mul 0 l).trans (by ring)
/-- Exchange of two sums. -/
theorem sum_comm (f : ι → κ → α) (l : List ι) (k : List κ) :
    sum (fun i => sum (fun j => f i j) k) l = sum (fun j => sum (fun i => f i j) l) k := by
  induction l with
  | nil => exact (sum_zero k).symm
  | cons i l ih => exact (congrArg (fun x => sum (f i) k + x) ih).trans (sum_add (f i) (fun j => sum (fun i => f i j) l) k).symm
end WitCert
