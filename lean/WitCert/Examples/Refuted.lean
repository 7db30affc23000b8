import WitCert.Examples.Rational
import WitCert.Attention.Gate
import WitCert.Attention.Jensen
import WitCert.Attention.Needle
import WitCert.Attention.Served
import WitCert.Attention.Visible
import WitCert.Probability.TierD
/-!
# Refuted: the wrong forms, and the hypotheses that cannot be dropped

Every statement is an explicit instance over the rationals, settled by computation. Tokens are `true` and `false`; a
list may repeat a token.
-/
set_option synthInstance.maxSize 4000
set_option maxRecDepth 20000
noncomputable section
namespace WitCert.Refuted

/-- Values at the tokens `true` and `false`. -/
def two (x y : Q) (b : Bool) : Q := cond b x y
theorem two_all {p : Q → Prop} {x y : Q} (hx : p x) (hy : p y) : ∀ b, p (two x y b) := fun b => by
  cases b with
  | true => exact hx
  | false => exact hy
/-- The cell with tokens `l`, weights `w, w'`, radii `r, r'`, true ratios `a, a'`. -/
def cellOf (l : List Bool) (w w' r r' a a' : Q) : Cell Q Bool := ⟨l, two w w', two r r', two a a'⟩
/-- Soundness of such a cell, as conditions that compute. -/
theorem cellOf_sound {l : List Bool} {w w' r r' a a' : Q} (hw : 0 ≤ w ∧ 0 ≤ w') (hs : sum (two w w') l ≤ 1 ∧ 1 ≤ sum (two w w') l)
    (hr : 1 ≤ r ∧ 1 ≤ r') (hl : 1 ≤ r * a ∧ 1 ≤ r' * a') (hu : a ≤ r ∧ a' ≤ r') : (cellOf l w w' r r' a a').Sound where
  w_nonneg := two_all hw.1 hw.2
  w_sum := le_antisymm hs.1 hs.2
  one_le_r := two_all hr.1 hr.2
  lower := fun b => by
    cases b with
    | true => exact hl.1
    | false => exact hl.2
  upper := fun b => by
    cases b with
    | true => exact hu.1
    | false => exact hu.2
theorem lt_of_not {x y : Q} (h : ¬ y ≤ x) : x < y := h
/-- All hypotheses of a sound cell except that the radius bounds the error from below (`e^{-c} ≤ a`). -/
structure SoundExceptLower (x : Cell Q Bool) : Prop where
  w_nonneg : ∀ t, 0 ≤ x.w t
  w_sum : sum x.w x.l = 1
  one_le_r : ∀ t, 1 ≤ x.r t
  upper : ∀ t, x.a t ≤ x.r t

/-! ### Wrong forms -/

/-- `p̃ = (½, ½)`, equal radii, opposite errors. -/
def opposite : Cell Q Bool := cellOf [true, false] (q 1 2) (q 1 2) (q 11 10) (q 11 10) (q 10 11) (q 11 10)
theorem opposite_sound : opposite.Sound :=
  cellOf_sound ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩

/-- **The dispersion form is wrong**: with `V = Q - η²` in place of `Q`, equal radii give the bound 0 while `TV > 0`.

Code: `witcert_core.meter.bounds.rms.bound` (uses `Q`).
`python: instance("opposite").Q - instance("opposite").eta ** 2 == 0 < instance("opposite").TV <= instance("opposite").code("rms")` -/
theorem dispersion : opposite.Sound ∧ opposite.Q - opposite.eta * opposite.eta ≤ 0 ∧ 0 < opposite.TV :=
  ⟨opposite_sound, by decide, lt_of_not (by decide)⟩

/-- Weights `1/9, 8/9`, radii `ln 8, 0`: the mean square of `c/ln 2` is 1. -/
def spread : Cell Q Bool := cellOf [true, false] (q 1 9) (q 8 9) (q 8 1) (q 1 1) (q 8 1) (q 1 1)
/-- **Averaging variances over tokens before the root is wrong**: with `c = (3 ln 2, 0)` the root mean square radius is
`ln 2`, so that form claims `tanh(ln 2 / 2) = 1/3`; the true `TV` is `7/18`.

Code: `witcert_core.cache.radii.radius_dither` (one root per token).
`python: instance("spread").w[0] * 3 ** 2 == 1 and Fraction(2 - 1, 2 + 1) < instance("spread").TV <= instance("spread").code("meter")` -/
theorem averaged_radius : spread.Sound ∧ spread.mean (fun t => two 3 0 t * two 3 0 t) = 1 ∧ ((2 : Q) - 1) / (2 + 1) < spread.TV :=
  ⟨cellOf_sound ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩,
    le_antisymm (by decide) (by decide), lt_of_not (by decide)⟩

/-- A block of eight tokens: one of weight ½ and radius `ln 2`, seven of weight 1/14 and radius 0. -/
def block : Cell Q Bool := cellOf (true :: false :: false :: false :: false :: false :: false :: false :: []) (q 1 2) (q 1 14) (q 2 1) (q 1 1) (q 2 1) (q 1 1)
/-- **One `e^c` per block is wrong**: mass times the block's mean of `e^c` is `9/8`, so `eform` would claim `17/128`; the
true `TV` is `1/6`.

Code: `witcert_core.meter.sums.accumulate_weights` (one `e^c` per token).
`python: (instance("block").blocked_A ** 2 - 1) / 2 < instance("block").TV <= instance("block").code("eform")` -/
theorem block_radius : block.Sound ∧
    (sum block.r block.l / 8 * (sum block.r block.l / 8) - 1) / 2 < block.TV :=
  ⟨cellOf_sound ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩,
    lt_of_not (by decide)⟩

/-- One token of weight 1/10 with `e^c = 100` that is raised in full. -/
def spike : Cell Q Bool := cellOf [true, false] (q 1 10) (q 9 10) (q 100 1) (q 1 1) (q 100 1) (q 1 1)
/-- **`jensen` on a grid of points is wrong** (its hypothesis `cover` cannot be dropped): at the masses 0 and ½ the value,
at the best `u`, stays below the true `TV`.

Code: `witcert_core.meter.bounds.jensen.bound` (intervals of masses).
`python: max(instance("spike").jensen_value(0, 0), instance("spike").jensen_value(Fraction(1, 2), instance("spike").eta / 2)) < instance("spike").TV <= instance("spike").code("jensen")` -/
theorem jensen_points : spike.Sound ∧ jensenValue spike.eta 0 0 < spike.TV ∧ jensenValue spike.eta (q 1 2) (spike.eta / 2) < spike.TV :=
  ⟨cellOf_sound ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩,
    lt_of_not (by decide), lt_of_not (by decide)⟩

/-- **The covariance form without its second root is wrong**: equal values `ṽ = 0`, `v = (0, 1)`, `ρ = (0, 1)`; the first
root is 0, so `Σ w ρ = ½` would bound an error of `121/221`.

Code: `witcert_core.meter.output.output_bound` (both roots).
`python: instance("opposite").p[1] == Fraction(121, 221) > Fraction(1, 2)` -/
theorem covariance_one_root : opposite.Sound ∧
    ¬ NormLe [true] (fun _ => sum (fun t => opposite.p t * two 0 1 t) opposite.l - sum (fun t => opposite.w t * 0) opposite.l)
      (sum (fun t => opposite.w t * two 0 1 t) opposite.l) :=
  ⟨opposite_sound, fun h => absurd h.2 (by decide)⟩

/-- Two tokens whose radii are 0: nothing was quantized. -/
def exact : Cell Q Bool := cellOf [true, false] (q 1 2) (q 1 2) 1 1 1 1
theorem exact_sound : exact.Sound :=
  cellOf_sound ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩
/-- **An output bound without the lost mass is wrong**: nothing is quantized, all values are 1, so `TV`, diameter, distances and
value radii are 0 and every form says 0. Both weights are rounded down by `2⁻⁸` and divided by the sum of the unrounded ones:
`255/256` is served.

Code: `witcert_core.meter.output.output_bound`.
`python: instance("exact").TV == 0 and instance("exact").A == 1 and sum(w * (1 - Fraction(1, 256)) for w in instance("exact").w) == 1 - Fraction(1, 256)` -/
theorem lost_mass_left_out : exact.Sound ∧ exact.TV ≤ 0 ∧ (exact.withCast (fun _ => -(q 1 256)) (q 1 256)).TV ≤ 0 ∧
    ¬ NormLe [true] (fun _ => sum (fun t => exact.p t * 1) exact.l - sum (fun t => exact.served (fun _ => -(q 1 256)) t * 1) exact.l) 0 ∧
    NormLe [true] (fun _ => sum (fun t => exact.p t * 1) exact.l - sum (fun t => exact.served (fun _ => -(q 1 256)) t * 1) exact.l)
      (0 + q 1 256 / (1 - q 1 256) * q 255 256) :=
  ⟨exact_sound, by decide, by decide, fun h => absurd h.2 (by decide), ⟨by decide, by decide⟩⟩

/-- **A meter over another window than the engine's is wrong**: all radii are 0, so every form says 0, but an engine that
attends the first token only is at `TV = ½` from the cell.

Code: `witcert_core.meter.measure.measure_rows` (`window_left`).
`python: instance("exact").code("meter") < tv([1, 0], instance("exact").p) == Fraction(1, 2)` -/
theorem another_window : exact.Sound ∧ exact.TV ≤ 0 ∧ q 1 2 ≤ tv (inWindow (fun b => b) exact.w exact.l) exact.p exact.l :=
  ⟨exact_sound, by decide, by decide⟩

/-! ### Wrong accounting -/

/-- Two independent fair coins. -/
def coins : Law Q (Bool × Bool) := Law.pair (Law.count true [false]) (Law.count true [false])
/-- **"Readers pay nothing" is wrong**: two readers whose cells each fail with probability ½ of their own; some reader
fails with probability ¾, above the ½ of one budget.

Code: `witcert_core.report.ledger.RequestLedger`.
`python: 1 - (1 - delta) ** 2 > delta` -/
theorem readers_pay_nothing : coins.P (fun o => o.1) ≤ q 1 2 ∧ coins.P (fun o => o.2) ≤ q 1 2 ∧ q 1 2 < coins.P (fun o => or o.1 o.2) :=
  ⟨by decide, by decide, lt_of_not (by decide)⟩
/-- **Leaving repaired tokens out of `S` is wrong**: two tokens, each violated with probability ½; an adversary repairs
the one that holds. The token left is violated with probability ¾, though it alone would be counted.

Code: `witcert_core.cache.radii.radius_dither` (`num_visible` counts repaired tokens).
`python: 1 - (1 - delta) ** 2 > delta` -/
theorem repaired_left_out : coins.P (fun o => o.1) ≤ q 1 2 ∧ coins.P (fun o => o.2) ≤ q 1 2 ∧
    q 1 2 < coins.P (fun o => cond o.1 o.1 o.2) := ⟨by decide, by decide, lt_of_not (by decide)⟩

/-- The grid of two offsets. -/
def grid : Law Q Q := Law.count (q 1 4) [-(q 1 4)]
/-- Rounding to the nearest of -1, 0, 1. -/
def round (z : Q) : Q := if z ≤ -(q 1 2) then -1 else if q 1 2 ≤ z then 1 else 0
/-- **One dither row per request is wrong** (`Fresh` cannot be dropped): a key that equals its own offset has residual
`|r| = ½` with probability 1, while every key fixed in advance, here 0, has it with probability 0.

Code: `witcert_core.quantizers.dither.DitherKey` (a new pass id for every forward pass).
`python: all(abs(x) == Fraction(1, 4) for x in residual_values(Fraction(0), Fraction(1), 1)) and all(abs(nearest(2 * u) - 2 * u) == Fraction(1, 2) for u in grid_points(1))` -/
theorem row_per_request : (1 : Q) ≤ grid.P (fun u => Law.geB (q 1 2) (abs (residual round 1 u u))) ∧
    grid.P (fun u => Law.geB (q 1 2) (abs (residual round 1 0 u))) ≤ 0 := ⟨by decide, by decide⟩

/-! ### Hypotheses that cannot be dropped -/

/-- Radii 0, but the first token's ratio is 0: only `e^{-c} ≤ a` fails. -/
def lost : Cell Q Bool := cellOf [true, false] (q 3 4) (q 1 4) 1 1 0 1
theorem lost_sound : SoundExceptLower lost where
  w_nonneg := two_all (by decide) (by decide)
  w_sum := le_antisymm (by decide) (by decide)
  one_le_r := two_all (le_refl 1) (le_refl 1)
  upper := fun b => by
    cases b with
    | true => exact zero_le_one
    | false => exact le_refl 1
/-- **`jensen` needs the lower radius**: without it the cell `[0, ½]` with `ub = η = 0` gives 0 and `TV = ¾`.

Code: `witcert_core.meter.bounds.jensen.bound`.
`python: instance("lost").eta == 0 and instance("lost").TV == Fraction(3, 4)` -/
theorem jensen_needs_lower : SoundExceptLower lost ∧ lost.eta ≤ 0 ∧
    jensenCell lost.eta 0 (q 1 2) (min 0 ((1 - 2 * 0 + lost.eta) / 2)) < lost.TV := ⟨lost_sound, by decide, lt_of_not (by decide)⟩
/-- **`needle` needs the lower radius**: `A_r/(A_r + w_h e^{-c_h}) = ¼` and `1 - w_h = ¼`, `TV = ¾`.

Code: `witcert_core.meter.bounds.needle.bound`.
`python: max(1 - instance("lost").w_h, instance("lost").A_r / (instance("lost").A_r + instance("lost").w_h)) < instance("lost").TV` -/
theorem needle_needs_lower : SoundExceptLower lost ∧ 1 - lost.w true < lost.TV ∧
    lost.w false * lost.r false / (lost.w false * lost.r false + lost.w true / lost.r true) < lost.TV :=
  ⟨lost_sound, lt_of_not (by decide), lt_of_not (by decide)⟩
/-- **`extremal` needs the lower radius**: with radii 0 every set has value 0.

Code: `witcert_core.meter.bounds.extremal.bound`.
`python: all(instance("lost").attack_value(s) == 0 for s in instance("lost").subsets) and instance("lost").TV > 0` -/
theorem extremal_needs_lower : SoundExceptLower lost ∧ lost.attackValue (two 0 0) < lost.TV ∧ lost.attackValue (two 1 0) < lost.TV ∧
    lost.attackValue (two 0 1) < lost.TV ∧ lost.attackValue (two 1 1) < lost.TV :=
  ⟨lost_sound, lt_of_not (by decide), lt_of_not (by decide), lt_of_not (by decide), lt_of_not (by decide)⟩

/-- A heavy token of large radius, which is better lowered, and a light one of smaller radius, raised. -/
def uncut : Cell Q Bool := cellOf [true, false] (q 9 10) (q 1 10) (q 3 1) (q 2 1) (q 1 3) (q 2 1)
/-- **`extremal` must cut tokens**: the sets of largest radii made of whole tokens, `∅`, `{true}`, `{true, false}`, all have
a value below the `TV` of the attack that raises only the token of smaller radius.

Code: `witcert_core.meter.bounds.extremal._split`.
`python: max(instance("uncut").attack_value(s) for s in ((0, 0), (1, 0), (1, 1))) < instance("uncut").TV <= instance("uncut").code("extremal")` -/
theorem extremal_must_cut : uncut.Sound ∧ uncut.attackValue (two 0 0) < uncut.TV ∧ uncut.attackValue (two 1 0) < uncut.TV ∧
    uncut.attackValue (two 1 1) < uncut.TV :=
  ⟨cellOf_sound ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩,
    lt_of_not (by decide), lt_of_not (by decide), lt_of_not (by decide)⟩

/-! ### Repair is not monotone -/

/-- Repair the first token. -/
def first (b : Bool) : Bool := b
/-- A common shift of both tokens. -/
def shifted : Cell Q Bool := cellOf [true, false] (q 1 2) (q 1 2) (q 2 1) (q 2 1) (q 2 1) (q 2 1)
/-- **The true `TV` may rise under repair**: from 0 to 1/6, when a common shift is broken.

Code: `witcert_core.policy.gates.Certified` (always evaluate again).
`python: instance("shifted").TV == 0 < instance("shifted").repaired(0).TV` -/
theorem tv_rises : shifted.Sound ∧ shifted.TV ≤ 0 ∧ 0 < (shifted.repair first).TV :=
  ⟨cellOf_sound ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩,
    by decide, lt_of_not (by decide)⟩
/-- `A = 39/20 ≤ 2`. -/
def rmsUp : Cell Q Bool := cellOf [true, false] (q 3 5) (q 2 5) (q 5 4) (q 3 1) (q 4 5) (q 3 1)
/-- **`rms` may rise under repair**, even while `A ≤ 2`.

Code: `witcert_core.meter.bounds.rms.bound`.
`python: instance("rmsUp").A <= 2 and instance("rmsUp").rms_sq < instance("rmsUp").repaired(0).rms_sq` -/
theorem rms_rises : rmsUp.Sound ∧ rmsUp.A ≤ 2 ∧ rmsUp.A * rmsUp.A * rmsUp.Q < (rmsUp.repair first).A * (rmsUp.repair first).A * (rmsUp.repair first).Q :=
  ⟨cellOf_sound ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩,
    by decide, lt_of_not (by decide)⟩
/-- `A = 29/5 > 2`. -/
def eformUp : Cell Q Bool := cellOf [true, false] (q 3 5) (q 2 5) (q 3 1) (q 10 1) (q 1 3) (q 10 1)
/-- **A saturated `eform` may rise under repair**: `A` goes from 29/5 to 7 (the hypothesis `A ≤ 2` cannot be dropped).

Code: `witcert_core.meter.bounds.eform.bound`.
`python: 2 < instance("eformUp").A < instance("eformUp").repaired(0).A` -/
theorem eform_rises : eformUp.Sound ∧ 2 < eformUp.A ∧ eformUp.A < (eformUp.repair first).A :=
  ⟨cellOf_sound ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩,
    lt_of_not (by decide), lt_of_not (by decide)⟩

/-- Two tokens of large radius. -/
def wholeUp : Cell Q Bool := cellOf [true, false] (q 1 2) (q 1 2) (q 10 1) (q 100 1) (q 10 1) (q 100 1)
/-- **The best set of whole tokens may rise under repair**: every set has a value below ½ before, and the true `TV` after it
is `9/11`. Only with cut tokens does the extremal bound never rise.

Code: `witcert_core.meter.bounds.extremal._split`.
`python: max(instance("wholeUp").attack_value(s) for s in instance("wholeUp").subsets) < instance("wholeUp").repaired(0).TV <= instance("wholeUp").code("extremal")` -/
theorem extremal_whole_rises : wholeUp.Sound ∧ wholeUp.attackValue (two 0 0) < (wholeUp.repair first).TV ∧
    wholeUp.attackValue (two 1 0) < (wholeUp.repair first).TV ∧ wholeUp.attackValue (two 0 1) < (wholeUp.repair first).TV ∧
    wholeUp.attackValue (two 1 1) < (wholeUp.repair first).TV :=
  ⟨cellOf_sound ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩ ⟨by decide, by decide⟩,
    lt_of_not (by decide), lt_of_not (by decide), lt_of_not (by decide), lt_of_not (by decide)⟩

/-- **A pre-RoPE witness needs the engine's pairing**: a rotation by the angle `(3/5, 4/5)` moves the norm of one channel
alone from 1 to 3/5 and of its partner from 0 to 4/5: a band that is not made of pairs keeps no norm.

Code: `witcert_core.quantizers.rotary.RotarySpec.pair_channels` (half-split or interleaved).
`python: rotated(d)[0] ** 2 != d[0] ** 2 and all(norm_sq(band(rotated(d), b)) == norm_sq(band(d, b)) for b in bands)` -/
theorem wrong_pairing : q 3 5 * q 3 5 + q 4 5 * q 4 5 = 1 ∧
    NormLe [((), true)] (fun p : Unit × Bool => cond p.2 0 1) (0 : Q) ∧
    ¬ NormLe [((), true)] (rope (fun _ => q 3 5) (fun _ => q 4 5) (fun p : Unit × Bool => cond p.2 0 1)) (0 : Q) :=
  ⟨le_antisymm (by decide) (by decide), ⟨by decide, by decide⟩, fun h => absurd h.2 (by decide)⟩
end WitCert.Refuted
end
