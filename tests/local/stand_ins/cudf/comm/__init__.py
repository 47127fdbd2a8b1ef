"""How tables travel."""
