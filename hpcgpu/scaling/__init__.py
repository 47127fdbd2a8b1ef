"""Decisions without I/O and without a clock: sizes, policy, failures, repair, walltime."""
