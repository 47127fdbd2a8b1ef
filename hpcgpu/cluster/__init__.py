"""The user's cluster object: a SpecCluster that reads the state of its manager, and sends it commands."""
