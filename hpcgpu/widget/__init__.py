"""A cluster live in a notebook."""
