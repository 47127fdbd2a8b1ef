"""What people see: progress of long operations, tables of jobs."""
