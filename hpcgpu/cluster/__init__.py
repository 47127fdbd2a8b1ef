"""What the user holds, and what manages its jobs."""
