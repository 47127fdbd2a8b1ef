"""Which protocol and which interface the workers of a cluster use. Runs inside jobs, where this can be seen."""
