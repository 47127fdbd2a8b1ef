"""What the manager records of its cluster: the phase, the parts that share it, and the log."""
