"""From logits and radii to a bound: sums, forms, outputs, failure budget; mathematics, what the proofs speak of."""
