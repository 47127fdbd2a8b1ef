"""A cluster seen from any program: look-up by name, connection, status, logs."""
