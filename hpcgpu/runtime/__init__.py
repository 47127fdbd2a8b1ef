"""What runs inside jobs, on compute nodes."""
