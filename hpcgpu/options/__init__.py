"""What users may set: the schema of options, the parsing of values, site profiles."""
