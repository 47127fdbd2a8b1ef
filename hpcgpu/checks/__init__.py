"""The checks of `hpcgpu check`: environment, GPUs, filesystem and network. Imports neither Dask nor CUDA."""
