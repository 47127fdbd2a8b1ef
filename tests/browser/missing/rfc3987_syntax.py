"""jsonschema imports this if it is there, which takes 1.6 s, for a kind of text that Jupyter's schemas do not have."""

raise ImportError("not in this environment")
