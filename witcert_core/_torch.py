"""PyTorch, imported before anything else here: without NumPy, which nothing here needs, its import warns."""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch

__all__ = ["torch"]
