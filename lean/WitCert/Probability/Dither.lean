import WitCert.Probability.Law
/-!
# The dyadic dither

`u` is uniform on `2ⁿ` equally spaced points. Its law is a sum of `n` independent signs (`dither_grid`), so its moment
generating function is at most `exp(λ² proxy / 2)` with `proxy = g²(4ⁿ - 1)/3`: with `g = 1/(2·2ⁿ)`, `(1 - 4⁻ⁿ)/12`.
-/
set_option synthInstance.maxSize 4000
universe u v
namespace WitCert
section
variable {α : Type u} [OrderedField α]
/-- `bⁿ`. -/
def pow (b : α) : Nat → α
  | .zero => 1
  | .succ n => b * pow b n
theorem pow_two_sq (n : Nat) : pow (2 : α) n * pow 2 n = pow 4 n := by
  induction n with
  | zero => show (1 : α) * 1 = 1; ring
  | succ n ih => show 2 * pow (2 : α) n * (2 * pow 2 n) = 4 * pow 4 n; rw [← ih]; ring
/-- Uniform on the `2ⁿ` points `g·(2j+1-2ⁿ)`, as a sum of `n` independent signs of sizes `g·2ⁱ`, `i < n` -/
def dither : Nat → α → Law α α
  | .zero, _ => Law.dirac 0
  | .succ n, g => Law.mix ((dither n g).map (fun y => y - g * pow 2 n)) ((dither n g).map (fun y => y + g * pow 2 n))
/-- Its variance, and sub-Gaussian proxy: `Σ_{i<n} (g·2ⁱ)²` -/
def proxy : Nat → α → α
  | .zero, _ => 0
  | .succ n, g => proxy n g + g * g * pow 4 n
/-- **Proxy in closed form**: `3·proxy = g²(4ⁿ - 1)`.

Code: `witcert_core.cache.radii.radius_dither`.
`python: sum((2 ** i * g(n)) ** 2 for i in range(n)) == (1 - Fraction(1, 4 ** n)) / 12` -/
theorem proxy_closed (n : Nat) (g : α) : 3 * proxy n g = g * g * (pow 4 n - 1) := by
  induction n with
  | zero => show (3 : α) * 0 = g * g * (1 - 1); ring
  | succ n ih =>
    show 3 * (proxy n g + g * g * pow 4 n) = g * g * (4 * pow 4 n - 1)
    exact eq_lin ih 1 (by ring)
/-- `2ⁿ` as a natural number. -/
def twoPow : Nat → Nat
  | .zero => 1
  | .succ n => twoPow n + twoPow n
/-- `rsum n f = Σ_{j < n} f j`. -/
def rsum : Nat → (Nat → α) → α
  | .zero, _ => 0
  | .succ n, f => rsum n f + f n
theorem rsum_add (m k : Nat) (f : Nat → α) : rsum (m + k) f = rsum m f + rsum k (fun j => f (m + j)) := by
  induction k with
  | zero => show rsum m f = rsum m f + 0; ring
  | succ k ih =>
    show rsum (m + k) f + f (m + k) = rsum m f + (rsum k (fun j => f (m + j)) + f (m + k))
    rw [ih]; ring
theorem rsum_congr {f g : Nat → α} (n : Nat) (h : ∀ j, f j = g j) : rsum n f = rsum n g := by
  have e : f = g := funext h
  rw [e]
theorem ofNat_twoPow (n : Nat) : (ofNat (twoPow n) : α) = pow 2 n := by
  induction n with
  | zero => rfl
  | succ n ih =>
    show (ofNat (twoPow n + twoPow n) : α) = 2 * pow 2 n
    rw [ofNat_add, ih]; ring
/-- **The dither law is uniform on 2ⁿ equally spaced points**, and a sum of `n` independent signs of sizes
`g, 2g, …, 2^{n-1}g`: `2ⁿ E f = Σ_{j < 2ⁿ} f(g(2j + 1 - 2ⁿ))`.

Code: `witcert_core.quantizers.dither.dither_vectors`.
`python: sorted(grid_points(n)) == sorted(sign_sums(n)) and code_offsets <= set(grid_points(8))` -/
theorem dither_grid (n : Nat) (g : α) (f : α → α) :
    pow 2 n * (dither n g).E f = rsum (twoPow n) (fun j => f (g * (2 * ofNat j + 1 - pow 2 n))) := by
  induction n generalizing f with
  | zero =>
    show (1 : α) * f 0 = 0 + f (g * (2 * 0 + 1 - 1))
    rw [show g * (2 * 0 + 1 - 1) = 0 from by ring]; ring
  | succ n ih =>
    show 2 * pow 2 n * (2⁻¹ * ((dither n g).E (fun y => f (y - g * pow 2 n)) + (dither n g).E (fun y => f (y + g * pow 2 n))))
      = rsum (twoPow n + twoPow n) (fun j => f (g * (2 * ofNat j + 1 - 2 * pow 2 n)))
    have h1 := ih (fun y => f (y - g * pow 2 n))
    have h2 := ih (fun y => f (y + g * pow 2 n))
    rw [rsum_add,
      rsum_congr (twoPow n) (f := fun j => f (g * (2 * ofNat j + 1 - 2 * pow 2 n))) (g := fun j => f (g * (2 * ofNat j + 1 - pow 2 n) - g * pow 2 n))
        (fun j => congrArg f (by ring)),
      rsum_congr (twoPow n) (f := fun j => f (g * (2 * ofNat (twoPow n + j) + 1 - 2 * pow 2 n))) (g := fun j => f (g * (2 * ofNat j + 1 - pow 2 n) + g * pow 2 n))
        (fun j => congrArg f (by rw [ofNat_add, ofNat_twoPow]; ring)), ← h1, ← h2]
    exact eq_lin two_half (pow 2 n * ((dither n g).E (fun y => f (y - g * pow 2 n)) + (dither n g).E (fun y => f (y + g * pow 2 n)))) (by ring)
theorem dither_mean (n : Nat) (g : α) : (dither n g).E (fun y => y) = 0 := by
  induction n with
  | zero => rfl
  | succ n ih =>
    show 2⁻¹ * ((dither n g).E (fun y => y - g * pow 2 n) + (dither n g).E (fun y => y + g * pow 2 n)) = 0
    rw [(dither n g).congr (f := fun y => y - g * pow 2 n) (g := fun y => 1 * y + -(g * pow 2 n)) (fun y => by ring),
      (dither n g).congr (f := fun y => y + g * pow 2 n) (g := fun y => 1 * y + g * pow 2 n) (fun y => by ring),
      Law.affine, Law.affine, ih]
    ring
end
variable {α : Type u} [ExpField α]
/-- **Moment generating function of the dither**: `E e^{λy + c} ≤ e^{λ² proxy/2 + c}`.

Code: `witcert_core.cache.radii.radius_dither` (`s²(1 - 4⁻ⁿ)/12`).
`python: mean(exp_down(lam * x) for x in grid_points(n)) <= exp_up(lam ** 2 * proxy(n) / 2)` -/
theorem dither_mgf (n : Nat) (g lam c : α) :
    (dither n g).E (fun y => exp (lam * y + c)) ≤ exp (2⁻¹ * (lam * lam * proxy n g) + c) := by
  induction n generalizing c with
  | zero =>
    show exp (lam * 0 + c) ≤ exp (2⁻¹ * (lam * lam * 0) + c)
    exact le_of_eq (congrArg exp (by ring))
  | succ n ih =>
    show 2⁻¹ * ((dither n g).E (fun y => exp (lam * (y - g * pow 2 n) + c)) + (dither n g).E (fun y => exp (lam * (y + g * pow 2 n) + c)))
      ≤ exp (2⁻¹ * (lam * lam * (proxy n g + g * g * pow 4 n)) + c)
    rw [(dither n g).congr (f := fun y => exp (lam * (y - g * pow 2 n) + c)) (g := fun y => exp (lam * y + (-(lam * (g * pow 2 n)) + c)))
        (fun y => congrArg exp (by ring)),
      (dither n g).congr (f := fun y => exp (lam * (y + g * pow 2 n) + c)) (g := fun y => exp (lam * y + (lam * (g * pow 2 n) + c)))
        (fun y => congrArg exp (by ring))]
    refine le_trans (mul_le_mul_left half_nonneg (add_le_add (ih _) (ih _))) ?_
    have hc := cosh_le (lam * (g * pow 2 n))
    have hs : exp (2⁻¹ * (lam * lam * (proxy n g + g * g * pow 4 n)) + c)
        = exp (2⁻¹ * (lam * lam * proxy n g) + c) * exp (2⁻¹ * (lam * (g * pow 2 n) * (lam * (g * pow 2 n)))) := by
      rw [← exp_add, ← pow_two_sq]
      exact congrArg exp (by ring)
    have h1 : ∀ z : α, exp (2⁻¹ * (lam * lam * proxy n g) + (z + c)) = exp (2⁻¹ * (lam * lam * proxy n g) + c) * exp z := fun z => by
      rw [← exp_add]
      exact congrArg exp (by ring)
    rw [hs, h1, h1]
    exact le_cert (nonneg_mul (nonneg_mul half_nonneg (exp_nonneg (2⁻¹ * (lam * lam * proxy n g) + c))) (sub_nonneg hc))
      (eq_lin two_half (-(exp (2⁻¹ * (lam * lam * proxy n g) + c) * exp (2⁻¹ * (lam * (g * pow 2 n) * (lam * (g * pow 2 n)))))) (by ring))
end WitCert
