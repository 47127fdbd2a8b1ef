"""The embedded queue: a batch system of one machine, for trying and for tests."""
