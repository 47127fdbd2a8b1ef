"""The docs of a plugin: its options, by the Sphinx extension of hpcgpu."""

project = "hpcgpu-abacus"
extensions = ["hpcgpu.sphinx"]
