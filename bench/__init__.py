"""Measurements by hand and for the documentation: `python -m bench.NAME` in the repository."""
