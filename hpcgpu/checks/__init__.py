"""Checks of environment, GPUs, filesystem and network; what `hpcgpu check` runs. Imports neither Dask nor CUDA."""
