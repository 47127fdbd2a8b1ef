"""Which protocol and which interface the workers of a cluster speak over. Runs inside jobs, where it can be seen."""
