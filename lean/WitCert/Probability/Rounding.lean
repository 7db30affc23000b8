import WitCert.Probability.Dither
/-!
# Subtractive dither

Round to a nearest integer with an offset `u` from the grid of `N` points and subtract the offset again. For a fixed
input the error, over the grid, takes the values of the reflected grid shifted by one number `o` with `|o| ≤ 1/(2N)`
(`dither_error`). Any rule for ties is allowed: `rd` is any map to a nearest integer.
-/
set_option synthInstance.maxSize 4000
universe u
namespace WitCert
variable {α : Type u} [OrderedField α]

theorem rsum_nonneg {f : Nat → α} (n : Nat) (h : ∀ j, 0 ≤ f j) : 0 ≤ rsum n f := by
  induction n with
  | zero => exact le_refl 0
  | succ n ih => exact add_nonneg ih (h n)
theorem le_rsum {f : Nat → α} (h : ∀ j, 0 ≤ f j) (i d : Nat) : f i ≤ rsum (i + 1 + d) f := by
  rw [rsum_add]
  show f i ≤ rsum i f + f i + rsum d _
  exact le_cert (add_nonneg (rsum_nonneg i h) (rsum_nonneg d (fun j => h (i + 1 + j)))) (by ring)
theorem rsum_zero (n : Nat) : rsum n (fun _ => (0 : α)) = 0 := by
  induction n with
  | zero => rfl
  | succ n ih => show rsum n (fun _ => (0 : α)) + 0 = 0; rw [ih]; ring

theorem int_cases {a b : α} (h : ∃ n : Nat, a = b + ofNat n ∨ b = a + ofNat n) (h1 : a < b + 2) (h2 : b < a + 1) : a = b ∨ a = b + 1 := by
  cases h with
  | intro n h => cases h with
    | inl h => cases n with
      | zero => exact Or.inl (h.trans (show b + 0 = b from by ring))
      | succ n => cases n with
        | zero => exact Or.inr h
        | succ n =>
          rw [ofNat_succ, ofNat_succ] at h
          exact absurd (show b + 2 ≤ a from le_cert (ofNat_nonneg n) (by
            rw [h]; show b + (ofNat n + 1 + 1) - (b + 2) = ofNat n; ring)) h1
    | inr h => cases n with
      | zero => exact Or.inl (Eq.symm (h.trans (show a + 0 = a from by ring)))
      | succ n =>
        rw [ofNat_succ] at h
        exact absurd (show a + 1 ≤ b from le_cert (ofNat_nonneg n) (by
          rw [h]; show a + (ofNat n + 1) - (a + 1) = ofNat n; ring)) h2

/-- The grid `(2j+1-N)/(2N)`, with `h = 1/(2N)` -/
def gridpt (N : Nat) (h : α) (j : Nat) : α := h * (2 * ofNat j + 1 - ofNat N)

variable (rd : α → α)
theorem near_lt (hnear : ∀ z, 2 * abs (rd z - z) ≤ 1) {p q : α} (hpq : p < q) : rd p < rd q + 1 := fun hc => by
  have a1 := le_abs (rd p - p)
  have a2 := neg_le_abs (rd q - q)
  refine hpq (le_of_mul_le zero_lt_two (le_cert (add_nonneg (add_nonneg (nonneg_mul zero_le_two (sub_nonneg hc))
    (add_nonneg (nonneg_mul zero_le_two (sub_nonneg a1)) (nonneg_mul zero_le_two (sub_nonneg a2))))
    (add_nonneg (sub_nonneg (hnear p)) (sub_nonneg (hnear q)))) (by ring)))
theorem near_lt2 (hnear : ∀ z, 2 * abs (rd z - z) ≤ 1) {p q : α} (hpq : q < p + 1) : rd q < rd p + 2 := fun hc => by
  have a1 := le_abs (rd q - q)
  have a2 := neg_le_abs (rd p - p)
  refine hpq (le_of_mul_le zero_lt_two (le_cert (add_nonneg (add_nonneg (nonneg_mul zero_le_two (sub_nonneg hc))
    (add_nonneg (nonneg_mul zero_le_two (sub_nonneg a1)) (nonneg_mul zero_le_two (sub_nonneg a2))))
    (add_nonneg (sub_nonneg (hnear p)) (sub_nonneg (hnear q)))) (by ring)))
theorem split_prefix {N : Nat} {h y : α}
    (hint : ∀ z w, ∃ n : Nat, rd z = rd w + ofNat n ∨ rd w = rd z + ofNat n)
    (hnear : ∀ z, 2 * abs (rd z - z) ≤ 1) (hh : 2 * h * ofNat N = 1) (h0 : 0 < h)
    (m : Nat) : ∀ d : Nat, m + 1 + d = N → ∃ J : Nat, ∃ K : Nat, J + K = m + 1 ∧
    (∀ f : α → α, rsum (m + 1) (fun j => f (rd (y + gridpt N h j) - (y + gridpt N h j)))
      = rsum J (fun j => f (rd (y + gridpt N h 0) - (y + gridpt N h j)))
        + rsum K (fun i => f (rd (y + gridpt N h 0) + 1 - (y + gridpt N h (J + i))))) ∧
    ((K = 0 ∧ rd (y + gridpt N h m) = rd (y + gridpt N h 0)) ∨ rd (y + gridpt N h m) = rd (y + gridpt N h 0) + 1) := by
  induction m with
  | zero =>
    intro d _
    refine ⟨1, 0, rfl, fun f => ?_, Or.inl ⟨rfl, rfl⟩⟩
    show (0 : α) + f _ = 0 + f _ + 0
    exact (ring_eq rfl : (0 : α) + f (rd (y + gridpt N h 0) - (y + gridpt N h 0)) = 0 + f (rd (y + gridpt N h 0) - (y + gridpt N h 0)) + 0)
  | succ m ih =>
    intro d hd
    have hd' : m + 1 + (d + 1) = N := by
      refine Eq.trans ?_ hd
      show Nat.succ (m + 1 + d) = Nat.succ (m + 1) + d
      rw [Nat.succ_add (m + 1)]
    have hN : (ofNat N : α) = ofNat m + 1 + ofNat d + 1 := by
      rw [← hd', ofNat_add, show (ofNat (m + 1) : α) = ofNat m + 1 from ofNat_succ m, show (ofNat (d + 1) : α) = ofNat d + 1 from ofNat_succ d]
      ring
    have hm1 : (ofNat (m + 1) : α) = ofNat m + 1 := ofNat_succ m
    have h2 : 0 < 2 * h := mul_pos zero_lt_two h0
    have lt0 : y + gridpt N h 0 < y + gridpt N h (m + 1) := lt_cert (mul_pos h2 (ofNat_succ_pos m)) (by
      show y + h * (2 * ofNat (m + 1) + 1 - ofNat N) - (y + h * (2 * 0 + 1 - ofNat N)) = _
      rw [hm1]; ring)
    have ltm : y + gridpt N h m < y + gridpt N h (m + 1) := lt_cert h2 (by
      show y + h * (2 * ofNat (m + 1) + 1 - ofNat N) - (y + h * (2 * ofNat m + 1 - ofNat N)) = _
      rw [hm1]; ring)
    have lt1 : y + gridpt N h (m + 1) < y + gridpt N h 0 + 1 := lt_cert (mul_pos h2 (ofNat_succ_pos d)) (by
      show y + h * (2 * 0 + 1 - ofNat N) + 1 - (y + h * (2 * ofNat (m + 1) + 1 - ofNat N)) = _
      rw [hm1]
      exact eq_lin2 hh hN (-1) (2 * h) (by ring))
    have c0 := int_cases (hint (y + gridpt N h (m + 1)) (y + gridpt N h 0)) (near_lt2 rd hnear lt1) (near_lt rd hnear lt0)
    have cm := near_lt rd hnear ltm
    cases ih (d + 1) hd' with
    | intro J ih => cases ih with
      | intro K ih =>
        have hs : ∀ f : α → α, rsum (m + 1 + 1) (fun j => f (rd (y + gridpt N h j) - (y + gridpt N h j)))
            = rsum (m + 1) (fun j => f (rd (y + gridpt N h j) - (y + gridpt N h j)))
              + f (rd (y + gridpt N h (m + 1)) - (y + gridpt N h (m + 1))) := fun f => rfl
        cases c0 with
        | inl c0 =>
          cases ih.2.2 with
          | inl hk =>
            have hJ : J = m + 1 := by
              have e := ih.1
              rw [hk.1] at e
              exact e
            refine ⟨J + 1, 0, by rw [hJ], fun f => ?_, Or.inl ⟨rfl, c0⟩⟩
            rw [hs f, ih.2.1 f, hk.1, c0, hJ]
            show _ + (0 : α) + f _ = _ + f _ + (0 : α)
            exact (by ring)
          | inr hk =>
            exfalso
            rw [hk, c0] at cm
            exact lt_irrefl _ cm
        | inr c0 =>
          refine ⟨J, K + 1, ?_, fun f => ?_, Or.inr c0⟩
          · show Nat.succ (J + K) = Nat.succ (m + 1)
            rw [ih.1]
          · rw [hs f, ih.2.1 f, c0]
            show rsum J _ + rsum K _ + _ = rsum J _ + (rsum K _ + f (rd (y + gridpt N h 0) + 1 - (y + gridpt N h (J + K))))
            rw [ih.1, add_assoc]

theorem offset_bound {o h P m : α} (t0 : 2 * abs (o - h * (2 * 0 + 1 - P)) ≤ 1) (t1 : 2 * abs (o - h * (2 * m + 1 - P)) ≤ 1)
    (hh : 2 * h * P = 1) (hM : P = m + 1) : abs o ≤ h := by
  have a0 := le_abs (o - h * (2 * 0 + 1 - P))
  have a1 := neg_le_abs (o - h * (2 * m + 1 - P))
  refine abs_le ?_ ?_
  · exact le_of_mul_le zero_lt_two (le_cert (add_nonneg (sub_nonneg t0) (nonneg_mul zero_le_two (sub_nonneg a0))) (eq_lin hh 1 (by ring)))
  · exact le_of_mul_le zero_lt_two (le_cert (add_nonneg (sub_nonneg t1) (nonneg_mul zero_le_two (sub_nonneg a1)))
      (eq_lin2 hh hM 1 (-(4 * h)) (by ring)))

/-- **Law of the subtractive dither.** For a fixed input `y`, the errors `rd(y+u_j) - (y+u_j)` over the grid are, as a
multiset, `o - u_j` for one offset `|o| ≤ h = 1/(2N)`.

Code: `witcert_core.quantizers.dither.quantize_int8`.
`python: is_shifted_grid(residual_values(y, Fraction(1), n), Fraction(1), n)` -/
theorem dither_error {M : Nat} {h y : α}
    (hint : ∀ z w, ∃ n : Nat, rd z = rd w + ofNat n ∨ rd w = rd z + ofNat n)
    (hnear : ∀ z, 2 * abs (rd z - z) ≤ 1) (hh : 2 * h * ofNat (M + 1) = 1) (h0 : 0 < h) :
    ∃ o : α, abs o ≤ h ∧ ∀ f : α → α,
      rsum (M + 1) (fun j => f (rd (y + gridpt (M + 1) h j) - (y + gridpt (M + 1) h j)))
        = rsum (M + 1) (fun j => f (o - gridpt (M + 1) h j)) := by
  cases split_prefix (y := y) rd hint hnear hh h0 M 0 rfl with
  | intro J H => cases H with
    | intro K H =>
      have hJK : (ofNat (M + 1) : α) = ofNat J + ofNat K := by rw [← H.1, ofNat_add]
      have main : ∀ f : α → α, rsum (M + 1) (fun j => f (rd (y + gridpt (M + 1) h j) - (y + gridpt (M + 1) h j)))
          = rsum (M + 1) (fun j => f (rd (y + gridpt (M + 1) h 0) + 1 - y - 2 * h * ofNat J - gridpt (M + 1) h j)) := fun f => by
        rw [H.2.1 f, show M + 1 = K + J from H.1.symm.trans (Nat.add_comm J K), rsum_add, add_comm]
        rw [show K + J = M + 1 from (Nat.add_comm K J).trans H.1]
        refine congr (congrArg (fun a b => a + b) (rsum_congr K (fun i => congrArg f ?_))) (rsum_congr J (fun j => congrArg f ?_))
        · show rd (y + gridpt (M + 1) h 0) + 1 - (y + h * (2 * ofNat (J + i) + 1 - ofNat (M + 1))) = rd (y + gridpt (M + 1) h 0) + 1 - y - 2 * h * ofNat J - h * (2 * ofNat i + 1 - ofNat (M + 1))
          rw [ofNat_add J i]; ring
        · show rd (y + gridpt (M + 1) h 0) - (y + h * (2 * ofNat j + 1 - ofNat (M + 1))) = rd (y + gridpt (M + 1) h 0) + 1 - y - 2 * h * ofNat J - h * (2 * ofNat (K + j) + 1 - ofNat (M + 1))
          rw [ofNat_add K j]
          exact eq_lin2 hh hJK 1 (-(2 * h)) (by ring)
      refine ⟨_, ?_, main⟩
      -- every point of the shifted grid is within 1/2, by a test function that vanishes there only
      have test := main (fun e => abs (2 * abs e - 1) + (2 * abs e - 1))
      have hz : rsum (M + 1) (fun j => abs (2 * abs (rd (y + gridpt (M + 1) h j) - (y + gridpt (M + 1) h j)) - 1)
          + (2 * abs (rd (y + gridpt (M + 1) h j) - (y + gridpt (M + 1) h j)) - 1)) = 0 := by
        refine (rsum_congr (M + 1) (fun j => ?_)).trans (rsum_zero (M + 1))
        have hb := hnear (y + gridpt (M + 1) h j)
        cases abs_cases (2 * abs (rd (y + gridpt (M + 1) h j) - (y + gridpt (M + 1) h j)) - 1) with
        | inl hc =>
          rw [hc.2]
          exact le_antisymm (le_cert (add_nonneg (sub_nonneg hb) (sub_nonneg hb)) (by ring)) (add_nonneg hc.1 hc.1)
        | inr hc => rw [hc.2]; ring
      have pt : ∀ i d : Nat, i + 1 + d = M + 1 → ∀ o : α, rsum (M + 1) (fun j => abs (2 * abs (o - gridpt (M + 1) h j) - 1) + (2 * abs (o - gridpt (M + 1) h j) - 1)) = 0 →
          2 * abs (o - gridpt (M + 1) h i) ≤ 1 := fun i d hid o ho => by
        have hl := le_rsum (f := fun j => abs (2 * abs (o - gridpt (M + 1) h j) - 1) + (2 * abs (o - gridpt (M + 1) h j) - 1))
          (fun j => le_cert (sub_nonneg (neg_le_abs (2 * abs (o - gridpt (M + 1) h j) - 1))) (by ring)) i d
        rw [hid, ho] at hl
        have hm := le_abs (2 * abs (o - gridpt (M + 1) h i) - 1)
        exact le_of_mul_le zero_lt_two (le_cert (add_nonneg (sub_nonneg hl) (sub_nonneg hm)) (by ring))
      have t0 := pt 0 M (Nat.add_comm 1 M) _ (test.symm.trans hz)
      have t1 := pt M 0 rfl _ (test.symm.trans hz)
      exact offset_bound t0 t1 hh (ofNat_succ M)
end WitCert
