"""Renders the templates into job scripts, and quotes every value for where it stands.

A value in a directive is read by the batch system's own parser (`Syntax.quote`), a value in the body by the shell
(`shell_word`).
"""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from hpcgpu.batch import system_registry
from hpcgpu.batch.directive_syntax import Directives, Syntax
from hpcgpu.errors import NotTrusted, OptionError
from hpcgpu.fabric import ucx_settings
from hpcgpu.options.shared_options_and_defaults import JobOptions, Options
from hpcgpu.posix.ownership import check, private_directory
from hpcgpu.scripts.container import HOST_COPY, Container


def shell_word(value: object) -> str:
    """Quote a value as one word for bash, on one line whatever it holds."""
    text = str(value)
    if all(c.isprintable() for c in text):
        return shlex.quote(text)
    escaped = "".join(
        c if c.isprintable() and c not in "\\'" else "".join(f"\\x{b:02x}" for b in c.encode()) for c in text
    )
    return f"$'{escaped}'"


def sha256(archive: Path) -> str:
    """Return the hash of an archive, which is read once unless it changes."""
    try:
        about = archive.stat()
        return _sha256(archive, about.st_size, about.st_mtime_ns, about.st_ino)
    except OSError as error:
        raise OptionError(f"stage={str(archive)!r} cannot be read: {error.strerror}") from error


@functools.cache
def _sha256(archive: Path, *_: int) -> str:
    with archive.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def script_name(system: str, kind: str, group: str = "default") -> str:
    """Return the file name of the script of one kind of job.

    It is ``worker.sbatch``, or ``worker-GROUP.sbatch`` for a group of workers with a name.
    """
    return f"{kind if group == 'default' else f'{kind}-{group}'}.{system_registry.system(system).suffix}"


def render(
    system: str, kind: str, options: Options, directory: Path, group: str = "default", *, command: str = ""
) -> str:
    """Return the text of a job script.

    Parameters
    ----------
    system : str
        Name of the batch system.
    kind : str
        ``"scheduler"`` or ``"worker"``.
    options : Options
    directory : Path
        The cluster's directory.
    group : str, default "default"
        The group of workers that ``options.worker`` belongs to.
    command : str, optional
        Name of the template of the command that the job runs: ``"check"``. Default: the template of the job's kind.

    Raises
    ------
    OptionError
        A directive has an option or a value that the batch system does not accept.
    """
    job: JobOptions | None = options.worker if kind == "worker" else options.scheduler
    if job is None:
        raise OptionError("scheduler='local': the scheduler runs in this process, so there is no scheduler job")
    script = directory / script_name(system, kind, group)
    return _job_script(
        system_registry.system(system), kind, options, job, directory, script, command=f"{command or kind}_command.j2"
    )


def render_bundle(system: str, options: Options, directory: Path) -> dict[str, str]:
    """Return the files that start a cluster without Python, by name.

    These are both job scripts, ``launch.sh``, ``stop.sh`` and ``README``.

    Parameters
    ----------
    system : str
        Name of a batch system, see `check_launch`.
    options : Options
    directory : Path
        The cluster's directory.
    """
    found = system_registry.system(system)
    jobs = {script_name(system, kind): render(system, kind, options, directory) for kind in ("scheduler", "worker")}
    context = _context(found, "bundle", options, directory) | {
        "scheduler_script": script_name(system, "scheduler"),
        "worker_script": script_name(system, "worker"),
        "cls": found.cluster_class.partition(":")[2],
    }
    templates = {"launch.sh": "launch.sh.j2", "stop.sh": "stop.sh.j2", "README": "bundle/README.j2"}
    return jobs | {name: _rendered(found, options, template, context) for name, template in templates.items()}


def render_single(system: str, options: Options, directory: Path, program: Sequence[str]) -> str:
    """Return the text of one script that runs scheduler, workers and a program in one allocation.

    Parameters
    ----------
    system : str
        Name of a batch system, see `check_single`.
    options : Options
        ``options.worker.nodes_per_job`` is the number of requested nodes.
    directory : Path
        The beginning of the path of the cluster's directory; the job's id follows.
    program : sequence of str
        Its command line.
    """
    script = directory.with_name(f"{directory.name}.{system_registry.system(system).suffix}")
    own = {"scheduler": options.scheduler, "program": program}
    return _job_script(system_registry.system(system), "single", options, options.worker, directory, script, **own)


def make_log_directory(options: Options) -> None:
    """Make the directory of the option `log_directory`, if it is given.

    Batch systems write logs there, under names that others can predict. They follow a symbolic link of that name and
    empty its target, and they block on a FIFO. So other users must not be able to create files in this directory.

    Raises
    ------
    OptionError
        The directory cannot be made or written, or others can change it.
    """
    if (path := options.cluster.log_directory) is None:
        return
    try:
        private_directory(path)
    except OSError as error:
        raise OptionError(f"log_directory={str(path)!r} cannot be made: {error.strerror}") from error
    try:
        check(path)
    except NotTrusted as error:
        raise OptionError(
            f"log_directory={str(path)!r}: {error}. Or name a directory that does not exist yet: hpcgpu makes it "
            "for you alone"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise OptionError(f"log_directory={str(path)!r} cannot be written")


def check_launch(system: str) -> None:
    """Raise `OptionError` for a batch system whose templates have no ``launch.sh``."""
    if not (system_registry.system(system).templates / "launch.sh.j2").exists():
        raise OptionError(f"{system_registry.system(system).title} has no scripts that start a cluster without Python")


def check_single(system: str) -> None:
    """Raise `OptionError` for a batch system whose templates have no script for one job that runs all."""
    found = system_registry.system(system)
    if not (found.templates / f"single.{found.suffix}.j2").exists():
        raise OptionError(f"{found.title} has no script that runs scheduler, workers and a program in one job")


def command(system: str, kind: str, options: Options, directory: Path) -> str:
    """Return the command that a job's script becomes at its end, for bash.

    Parameters
    ----------
    system : str
    kind : str
        ``"scheduler"`` or ``"worker"``.
    options : Options
    directory : Path
        The cluster's directory.
    """
    job = options.worker if kind == "worker" else options.scheduler
    assert job is not None
    found = system_registry.system(system)
    context = _context(found, kind, options, directory) | {"job": job, "interpreter": '"$python"'}
    text = _rendered(found, options, f"{kind}_command.j2", context)
    return text.replace('"$python"', shell_word(job.python)).replace('"$directory"', shell_word(directory)).strip()


def _job_script(
    system: system_registry.System,
    kind: str,
    options: Options,
    job: JobOptions,
    directory: Path,
    script: Path,
    **own: Any,
) -> str:
    syntax = system.scripts()
    directives = Directives(syntax, job.job_directives_skip, job.job_extra_directives)
    context = {
        **_context(system, kind, options, directory),
        "job": syntax.complete(job, directives),
        "script": script,
        "interpreter": '"${staged[@]}"' if job.stage else '"$python"',
        "directive": directives.add,
        "further_directives": directives.further,
        "asked": directives.asked,
        **own,
    }
    text = _rendered(system, options, f"{kind}.{system.suffix}.j2", context)
    if not syntax.few:
        _refuse_unused(system, options, job)
    return _squeeze(text, syntax)


def _refuse_unused(system: system_registry.System, options: Options, job: JobOptions) -> None:
    """Refuse options for the batch system alone that none of its templates reads: they would do nothing."""
    folders = filter(None, (system.templates, options.cluster.template_directory))
    templates = "".join(path.read_text() for folder in folders for path in folder.rglob("*.j2"))
    for name in ("queue", "account", "walltime", "gpu_type"):
        if getattr(job, name) is not None and f"job.{name}" not in templates:
            raise OptionError(
                f"{name}: the job scripts of {system.title} do not use this option. Leave it out, and write what the "
                "script needs instead into job_extra_directives"
            )


def _rendered(system: system_registry.System, options: Options, template: str, context: Mapping[str, Any]) -> str:
    environment = _environment(system, options)
    try:
        return environment.get_template(template).render(context)
    except jinja2.TemplateError as error:
        own = options.cluster.template_directory
        line = _line(error, own) if own else None
        if line is None:  # a defect of hpcgpu or of a plugin, whose developers need the traceback
            raise
        problem = (error.message or "").removesuffix(".")
        raise OptionError(
            f"template_directory: {line}: {problem}. Correct it there: hpcgpu's own templates in "
            f"{system_registry.common_templates()} show which names there are"
        ) from error


def _line(error: jinja2.TemplateError, directory: Path) -> str | None:
    """Return the last line of a directory's templates that Jinja2 read; a syntax error is not in the traceback."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        steps = [(error.filename or "", error.lineno)]
    else:
        steps = [(step.filename, step.lineno or 0) for step in traceback.extract_tb(error.__traceback__)]
    lines = [f"{file}, line {number}" for file, number in steps if Path(file).is_relative_to(directory)]
    return lines[-1] if lines else None


class _StrictUndefined(jinja2.StrictUndefined):
    """An undefined name that also says so where a filter formats it: Jinja2's own is a TypeError there."""

    def __format__(self, spec: str) -> str:
        return str(self)


def _check_ownership(option: str, *paths: Path) -> None:
    """Refuse files that jobs would run and that other users can change."""
    try:
        for path in paths:
            check(path, group_may_write=True)
    except NotTrusted as error:
        raise OptionError(f"{option}: {error}") from error
    except OSError as error:  # removed since the cluster started
        raise OptionError(f"{option}={str(paths[0])!r} cannot be read: {error.strerror}") from error


def _environment(system: system_registry.System, options: Options) -> jinja2.Environment:
    own = options.cluster.template_directory
    _check_ownership("template_directory", *([own, *own.rglob("*")] if own else ()))
    for job in (options.worker, options.scheduler):
        if job is not None and job.stage is not None and job.stage.exists():
            _check_ownership("stage", job.stage)
        if job is not None and isinstance(job.job_script_prologue, Path) and job.job_script_prologue.exists():
            _check_ownership("job_script_prologue", job.job_script_prologue)
    env = _templates(system.templates, system.syntax)
    if own is None:
        return env
    return env.overlay(loader=jinja2.FileSystemLoader([own, system.templates, system_registry.common_templates()]))


@functools.cache  # compiling the templates takes much longer than rendering them
def _templates(directory: Path, syntax: str) -> jinja2.Environment:
    scripts: Syntax = system_registry.load(syntax)
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader([directory, system_registry.common_templates()]),
        undefined=_StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        keep_trailing_newline=True,
    )
    env.globals |= scripts.names
    env.filters |= {
        "shell": shell_word,
        "directive": scripts.quote,
        "seconds": lambda value: f"{value:g}",
        "escape_percent": lambda value: str(value).replace("%", "%%"),
        "resources": lambda value: ",".join(f"{name}={amount:g}" for name, amount in value),
        "flag": _flag,
        "sha256": sha256,
        **scripts.filters,
    }
    env.tests["string_list"] = lambda value: isinstance(value, tuple)
    return env


def _context(system: system_registry.System, kind: str, options: Options, directory: Path) -> dict[str, Any]:

    def container(job: JobOptions) -> Container:
        return Container(system, options, job, directory)

    return {
        "system": system.name,
        "container": container,
        # the command that starts a process on each node, and in the container
        "enter": lambda job, launcher: container(job).command(launcher) if job.container else launcher,
        # how Python starts one of our modules: in a container the image may lack hpcgpu
        "start": lambda job: (
            f'"$directory"/{HOST_COPY}/hpcgpu/runtime/container_entry.py' if job.container else "-P -m"
        ),
        "kind": kind,
        "cluster": options.cluster,
        "directory": directory,
        "logs": options.cluster.log_directory or directory / "logs",
        "rmm_pool": options.worker.rmm_pool_size is not None,
        "cudf_spill": options.worker.enable_cudf_spill,
        "ucx_environment": lambda job: ucx_settings.environment(options.worker, job.ucx_env),
    }


def _flag(flag: str, value: object) -> str:
    """Return an option of the worker command; a boolean that is False becomes ``--disable-NAME``, or is left out."""
    if value is True:
        return flag
    if value is False:
        return flag.replace("--enable-", "--disable-", 1) if flag.startswith("--enable-") else ""
    return f"{flag} {shell_word(value)}"


def _squeeze(text: str, syntax: Syntax) -> str:
    """Remove the empty lines that unset options left between the directives; the body stays as it is."""
    lines = text.splitlines()
    last = max((i for i, line in enumerate(lines) if line.startswith(syntax.prefix)), default=0)
    return "\n".join([line for line in lines[: last + 1] if line.strip()] + lines[last + 1 :]) + "\n"
