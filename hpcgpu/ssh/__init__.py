"""Runs commands on another host by the system's ssh, and carries connections through it."""
