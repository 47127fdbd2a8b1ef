"""What a program needs to use a cluster: its Dask client, the reason why its scheduler is lost, its dashboard."""
