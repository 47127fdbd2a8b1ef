"""Saves the results of a cluster on the shared disk, and restores them on any later cluster."""
