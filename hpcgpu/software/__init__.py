"""The software of a process, and whether two processes fit together."""
