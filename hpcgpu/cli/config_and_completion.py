"""Commands on configuration: the options of a new cluster and their origin, and completion in the shell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hpcgpu.cli.options import ClusterCommand, cluster_options, system_option
from hpcgpu.cli.printing import json_option, show, show_json

if TYPE_CHECKING:
    from hpcgpu.cli.json_types import OptionJSON


@click.command(cls=ClusterCommand)
@system_option
@click.option("--all", "everything", is_flag=True, help="Show options with default values too.")
@click.option("--template", is_flag=True, help="Print a configuration file that explains every option.")
@json_option
@cluster_options
def config(system: str, everything: bool, template: bool, as_json: bool, arguments: dict[str, Any]) -> None:
    """Show the options of a new cluster, and where each value comes from.

    \b
    Examples: hpcgpu config --system slurm
              hpcgpu config --gpus-per-node 4 --all --json
              hpcgpu config --template > ~/.config/dask/hpcgpu.yaml
    """
    from hpcgpu.cli.start_and_run import chosen_system
    from hpcgpu.configuration.effective_options import effective
    from hpcgpu.configuration.effective_options import template as text

    if template:
        click.echo(text(), nl=False)
        return
    options = effective(chosen_system(system, arguments.get("profile")), arguments)
    chosen = [option for option in options if everything or option.source != "default"]
    if as_json:
        found: dict[str, OptionJSON] = {o.name: {"value": o.value, "source": o.source} for o in chosen}
        show_json(found)
        return
    if chosen:
        show(("option", "value", "from"), [(option.name, str(option.value), option.source) for option in chosen])
    else:
        click.echo("Every option has its default.")


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell: for commands, options and names of clusters.

    \b
    Example: hpcgpu completion bash > ~/.local/share/bash-completion/completions/hpcgpu
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(click.get_current_context().find_root().command, {}, "hpcgpu", "_HPCGPU_COMPLETE").source())
