"""Protocol and network interface of a cluster's workers. Runs inside jobs, where the network can be examined."""
