"""Device functions that operations share: tiles, addressing, radii, the meter's running sums, the merge of splits."""
