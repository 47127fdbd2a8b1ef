"""The page of this package, by the Sphinx extension of hpcgpu: python -m sphinx -nWq docs docs/_build."""

project = "hpcgpu-htcondor"
extensions = ["hpcgpu.sphinx"]
default_role = "code"
smartquotes = False  # they would change what is copied from the page
exclude_patterns = ["_build"]
