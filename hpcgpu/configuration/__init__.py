"""Where options come from: arguments, dask's configuration, site profiles.

It is above `hpcgpu.batch`, because each batch system adds options.
"""
