"""What a slot of the cache remembers about the error made in it, and the radii read from that."""
