"""What every engine adapter shares: rows of a pass, caches, one runtime. Engines hand over tensors, never objects."""
