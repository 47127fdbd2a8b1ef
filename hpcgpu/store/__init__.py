"""The cluster directory and all that is kept in it."""
