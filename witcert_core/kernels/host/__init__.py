"""What the operations share before a launch: backends, page tables, checks, rounding constants."""
