"""The policy file, gates as decisions, plugins."""
