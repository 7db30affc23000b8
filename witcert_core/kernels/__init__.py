"""Device code: one package per operation, each with a torch reference and a Triton kernel beside it."""
