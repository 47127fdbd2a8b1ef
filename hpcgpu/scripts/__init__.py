"""Renders the job scripts from templates/."""
