"""How often the queue of a batch system is polled, and how its answers are joined over time."""
