"""cuML has its classes for Dask in a subpackage."""
