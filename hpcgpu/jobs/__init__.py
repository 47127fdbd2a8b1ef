"""The jobs of a cluster, their phases, and the groups of workers."""
