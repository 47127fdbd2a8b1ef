"""Manages one cluster: observes, decides, acts."""
