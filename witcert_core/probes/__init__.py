"""Probes: questions that are asked of a meter while it runs. Their language, which rows they need, what they answer."""
