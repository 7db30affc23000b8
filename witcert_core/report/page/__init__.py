"""A run's JSON lines as one page of HTML for people, without a network."""
