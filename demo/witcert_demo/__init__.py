"""A small trained retrieval model, its outlier twin, and the tasks that score them."""

from pathlib import Path

NEEDLE_TINY = Path(__file__).parent / "needle_tiny"
"""The shipped checkpoint (Hugging Face Llama layout); how it was made is in its ``training.json``."""
