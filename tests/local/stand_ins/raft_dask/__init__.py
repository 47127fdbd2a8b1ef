"""RAFT for Dask."""
