"""Where options come from: arguments, dask's configuration, site profiles. Above `hpcgpu.batch`, because each batch
system adds its own.
"""
