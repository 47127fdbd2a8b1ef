"""``python -m hpcgpu``: the `hpcgpu` command."""

from hpcgpu.cli import main

main(prog_name="hpcgpu")
