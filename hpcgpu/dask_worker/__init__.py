"""Additions of hpcgpu to Dask's workers and nannies: their preloads, and what workers report to the scheduler."""
