"""Decisions without I/O and without a clock: sizes, policy, replacement, repair, walltime."""
