"""The engines of cudf-polars."""
