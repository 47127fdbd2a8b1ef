"""`hpcgpu profiles`: options of known sites."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgpu.cli.names import AUTO, SystemName
from hpcgpu.cli.printing import json_option, show, show_json
from hpcgpu.display.counts_and_durations import counted

if TYPE_CHECKING:
    from hpcgpu.cli.json_types import ProfileCheckJSON, ProfileJSON


@click.group()
def profiles() -> None:
    """Show the profiles of sites, compare one with the machine you are on, and draft one for it.

    \b
    Use one by:  SlurmGPUCluster(profile="perlmutter", account="m1234", walltime="2h")
                 hpcgpu start demo --profile perlmutter --account m1234 --walltime 2h
    """


@profiles.command("list")
@json_option
def list_profiles(as_json: bool) -> None:
    """List the profiles: yours, from ~/.config/hpcgpu/profiles, those of the environment, those of hpcgpu, and those of
    packages that add a batch system.

    \b
    Example: hpcgpu profiles list
    """
    from hpcgpu.profiles.site_profiles import load, names

    found = [load(name) for name in names()]
    if as_json:
        rows: list[ProfileJSON] = [
            {
                "name": profile.name,
                "system": profile.system,
                "about": profile.about,
                "source": profile.source,
                "date": profile.date,
                "path": str(profile.path),
            }
            for profile in found
        ]
        show_json(rows)
        return
    show(("name", "system", "about", "date", "file"), [(p.name, p.system, p.about, p.date, str(p.path)) for p in found])


@profiles.command("show")
@click.argument("name")
def show_profile(name: str) -> None:
    """Print the file of a profile: the options that it sets, the options that it needs from you, and its source.

    \b
    Example: hpcgpu profiles show polaris
    """
    from hpcgpu.profiles.site_profiles import load

    click.echo(load(name).path.read_text(), nl=False)


@profiles.command()
@click.argument("name")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write, - for the terminal. Default: NAME.yaml in your profiles.",
)
@click.option("--system", type=SystemName(auto=True), default=AUTO, show_default=True, help="Batch system.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def new(name: str, output: Path | None, system: str, force: bool) -> None:
    """Draft a profile from what the batch system says: sinfo, scontrol and sacctmgr, or pbsnodes and qstat.

    Run it on a login node. The draft describes the nodes with the most GPUs, among the queues that you can use.
    Comments show the other queues, the limits, and what you must decide.

    \b
    Example: hpcgpu profiles new mysite
    """
    from hpcgpu.batch import system_registry
    from hpcgpu.batch.detect import Detected, detect
    from hpcgpu.options.values import new_name
    from hpcgpu.profiles.draft_profile import draft
    from hpcgpu.profiles.site_profiles import user_directory

    new_name("NAME", name)
    found = Detected(system_registry.system(system)) if system != AUTO else detect()
    if found.system is None:
        raise click.ClickException(
            ". ".join(
                ["no batch system answers here, so no profile can be drafted: run this on a login node", *found.silent]
            )
        )
    text = draft(found.system)
    if str(output) == "-":
        click.echo(text, nl=False)
        return
    path = output or user_directory() / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(path, "w" if force else "x") as file:
            file.write(text)
    except FileExistsError as error:
        raise click.ClickException(f"{path} already exists: use --force to overwrite it") from error
    click.echo(f"Wrote {path}. Next:")
    click.echo("- review it: the comments say what you must decide")
    if path.absolute() != user_directory() / f"{name}.yaml":
        click.echo(f"- move it to {user_directory() / name}.yaml: hpcgpu finds it there")
    click.echo(f"- compare it with this machine: hpcgpu profiles check {name}")
    click.echo(f"- use it: profile={name!r}, or --profile {name}")


@profiles.command()
@click.argument("name")
@json_option
def check(name: str, as_json: bool) -> None:
    """Compare a profile with what the batch system says: sinfo, scontrol and sacctmgr, or pbsnodes and qstat.

    Run it on a login node. It compares queues, GPUs, cores, memory, features, walltime, account and QOS, and submits
    nothing. Each line shows the profile's value, what this machine says, and what to write instead. "not checked"
    means that the batch system does not say, or that the profile leaves the choice to you.

    \b
    Example: hpcgpu profiles check perlmutter
    Exit status: 0 if no line is a failure, 1 if one is or if the batch system does not answer.
    """
    from hpcgpu.checks.check_profile import check_profile
    from hpcgpu.profiles.site_profiles import load

    profile = load(name)
    found = check_profile(profile)
    failed = sum(one.grade == "failure" for one in found)
    if as_json:
        result: ProfileCheckJSON = {
            "name": name,
            "path": str(profile.path),
            "ok": not failed,
            "options": found,
        }
        show_json(result)
        sys.exit(bool(failed))
    show(
        ("job", "option", "", "profile", "this machine", "write"),
        [(one.job, one.option, one.grade, one.profile, one.machine, one.advice) for one in found],
    )
    open_ = sum(one.grade == "not checked" for one in found)
    click.echo(f"\n{profile.path}: {counted(failed, 'failure')}, {len(found) - failed - open_} ok, {open_} not checked")
    sys.exit(bool(failed))
