"""What a cluster cost, and what would have cost less."""
