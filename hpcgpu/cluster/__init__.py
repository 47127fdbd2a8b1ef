"""What the user holds, and what keeps its jobs as they should be."""
