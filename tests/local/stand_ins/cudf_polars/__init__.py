"""cudf-polars has its engines in a subpackage."""
