"""What users may set: the schema, the parsing of values, site profiles, Dask's configuration."""
