"""The clusters of this user that exist, seen from any program: look-up, status, logs, stop, removal."""
