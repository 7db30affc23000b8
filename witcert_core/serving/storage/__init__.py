"""Where tokens live, in plain torch, and what repairs them."""
