"""Additions of hpcgpu to the Dask scheduler: its preload, the calls that the manager needs, and what they measure."""
