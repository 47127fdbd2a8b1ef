"""Renders the templates into job scripts, and quotes every value for where it stands.

A value that goes into a directive is read by the batch system's own parser, one that goes into the body by the shell: two filters.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from hpcgpu.batch.pbs.names import VARIABLE, pbs_name, pbs_prefix
from hpcgpu.errors import NotTrusted, OptionError
from hpcgpu.fabric import settings
from hpcgpu.options.common import JobOptions, Options
from hpcgpu.posix.ownership import check

__all__ = ["command", "directive_value", "render", "render_bundle", "render_single", "script_name", "shell_word"]

#: sbatch's options that would break how the cluster submits its jobs.
_REFUSED = {
    "--array": "each job of a cluster is one job",
    "-a": "each job of a cluster is one job",
    "--wait": "the cluster itself waits",
    "-W": "the cluster itself waits",
    "--test-only": "nothing would be submitted",
    "--wrap": "the script is what runs",
    "--dependency": "the cluster sets it",
    "-d": "the cluster sets it",
    "--parsable": "the cluster sets it",
}

#: qsub's.
_REFUSED_PBS = {
    "-J": "each job of a cluster is one job",
    "-I": "a job of a cluster has no terminal",
    "-z": "the cluster needs the job's id",
    "-V": "set env, or job_script_prologue: the environment of a login node breaks jobs in ways that are hard to see",
    "-W block": "the cluster itself waits",
    "-W depend": "the cluster sets it",
    "-W interactive": "a job of a cluster has no terminal",
    "-h": "the job would wait for ever",
    "-C": "the directives begin with #PBS",
}
#: Memory of a PBS job for each Dask process, where the user names none: the cgroup hook gives 256 MB to a job that asks for none.
_PBS_MEMORY = 4 * 2**30


def templates() -> Path:
    """Directory of the package's own templates: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).parents[1]
    packaged = package / "templates"
    return packaged if packaged.is_dir() else package.parent / "templates"


def directive_value(value: object) -> str:
    r"""Quote a value for a directive.

    sbatch's parser is no shell: a backslash escapes in every kind of quotes, variables are not expanded, an unquoted ``#`` begins a
    comment (seen on a real sbatch 22.05.8 and in the source of its ``get_argument``). So `shlex.quote` would be wrong.
    """
    text = str(value)
    _refuse_control_characters(text)
    if text and all(c.isascii() and (c.isalnum() or c in "_./:,@%+=-") for c in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def shell_word(value: object) -> str:
    """Quote a value as one word for bash, on one line whatever it holds."""
    text = str(value)
    if all(c.isprintable() for c in text):
        return shlex.quote(text)
    escaped = "".join(c if c.isprintable() and c not in "\\'" else "".join(f"\\x{b:02x}" for b in c.encode()) for c in text)
    return f"$'{escaped}'"


def pbs_value(value: object) -> str:
    """Quote a value for a ``#PBS`` directive: qsub takes it apart as a shell does (OpenPBS, ``make_argv`` of ``qsub.c``)."""
    text = str(value)
    _refuse_control_characters(text)
    return text if text and all(c.isascii() and (c.isalnum() or c in "_./:,@%+=-^") for c in text) else shlex.quote(text)


@dataclass(frozen=True)
class Syntax:
    """How the directives of a batch system are written.

    Attributes
    ----------
    prefix : str
        What a line begins with: ``#SBATCH``.
    quote : callable
        Quotes a value.
    refused : mapping
        Options that a user's directive cannot be, and why.
    keyed : collection of str
        Options whose value has a name of its own, which makes them another option: ``-l walltime``.
    few : bool
        Other batch systems have more options, which mean nothing here.
    """

    prefix: str
    quote: Callable[[object], str]
    refused: Mapping[str, str]
    keyed: Collection[str] = ()
    few: bool = False

    def option(self, text: str) -> str:
        """Return the name of the option that a directive sets: ``--mem`` of ``--mem=0``, ``-l walltime`` of ``-l walltime=1:00``."""
        words = text.split("=", 1)[0].split()
        if words and words[0][:2] in self.keyed:
            return " ".join([words[0][:2], *filter(None, [words[0][2:]]), *words[1:2]])
        return words[0] if words else ""


_SYNTAX = {
    "slurm": Syntax("#SBATCH", directive_value, _REFUSED),
    "pbs": Syntax("#PBS", pbs_value, _REFUSED_PBS, ("-l", "-W")),
    "local": Syntax("#HPCGPU", directive_value, _REFUSED, few=True),
}


def parse_directive(text: str, syntax: Syntax = _SYNTAX["slurm"]) -> tuple[str, str | None]:
    """Split a user's directive into option and value: ``--mem=0``, ``-C gpu``, ``--exclusive``, ``--constraint="a&b"``.

    Raises
    ------
    OptionError
        It does not begin with an option.
    """
    text = text.strip()
    if not text.startswith("-") or text.strip("-") == "":
        raise OptionError(f"job_extra_directives: {text!r} does not begin with an option, such as '--exclusive' or '-C gpu'")
    if text[:2] in syntax.keyed:
        option, value = syntax.option(text), text.partition("=")[2]
        if re.search(r",\w+=", value) and '"' not in value:
            raise OptionError(f"job_extra_directives: {text!r} sets more than one: write one an entry")
    elif text.startswith("--") and "=" in text and " " not in text.split("=", 1)[0]:
        option, value = text.split("=", 1)
    elif not text.startswith("--") and len(text) > 2 and text[2] != " ":
        option, value = text[:2], text[2:]  # -pgpu
    else:
        option, _, value = text.partition(" ")
    value = value.strip()
    if not value:
        return option, None if "=" not in text else ""
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise OptionError(f"job_extra_directives: {text!r}: {error}") from error
    if len(words) != 1:
        raise OptionError(f"job_extra_directives: {text!r} holds more than one value: quote it, or write one option an entry")
    return option, words[0]


def _dashed(item: str, syntax: Syntax) -> str:
    """Return an option's name with its dashes, which users leave out: ``mem`` is ``--mem``, to PBS ``-l mem``; ``n`` is ``-n``."""
    name = item.strip()
    if name.startswith("-") or not name:
        return name
    if len(name.split("=", 1)[0]) == 1:
        return f"-{name}"
    return f"-l {name}" if syntax.keyed else f"--{name}"


class Directives:
    """The directives of one script: one ordered set, each option once.

    Parameters
    ----------
    syntax : Syntax
    skip : sequence of str
        Options to leave out, by any of their spellings (the name alone counts: ``-n`` is not ``-N``).
    extra : sequence of str
        The user's further directives.
    """

    def __init__(self, syntax: Syntax, skip: Sequence[str], extra: Sequence[str]) -> None:
        self.syntax = syntax
        self.skip = {option: item for item in skip if (option := syntax.option(_dashed(item, syntax)))}
        self.known: set[str] = set()
        self.extra = [parse_directive(item, syntax) for item in extra]
        self.owners: dict[str, str] = {}

    def asked(self, spelling: str) -> bool:
        """Whether an option is not to be left out."""
        self.known.add(spelling)
        return spelling not in self.skip

    def add(self, owner: str, *spellings_and_value: Any) -> str:
        """Return the line of one directive, from the option that owns it, its spellings and its value; empty if it is left out."""
        *spellings, value = spellings_and_value
        self.known.update(spellings)
        if self.skip.keys() & set(spellings):
            return ""
        self.owners.update(dict.fromkeys(spellings, owner))
        if value is None or value is False:
            return ""
        return f"{self._line(spellings[-1], None if value is True else value)}\n"

    def further(self) -> str:
        """Return the lines of the user's own directives; called when all others are made."""
        if not self.syntax.few and (unknown := [item for option, item in self.skip.items() if option not in self.known]):
            raise OptionError(
                f"job_directives_skip: {unknown[0]!r} is none of this script's directives, so there is nothing to leave out: remove it. "
                f"They are {', '.join(sorted(self.known))}"
            )
        lines = []
        for i, (option, value) in enumerate(self.extra):
            if option in self.syntax.refused:
                raise OptionError(f"job_extra_directives: {option} cannot be: {self.syntax.refused[option]}")
            if option in (other for other, _ in self.extra[:i]):
                raise OptionError(f"job_extra_directives: {option} is given twice")
            # sbatch takes any beginning of a long option for it, unless that is an option too.
            shortened = option.startswith("--") and option != "--ntasks"
            spelled = next((o for o in self.owners if shortened and o.startswith(option)), option)
            if owner := self.owners.get(spelled):
                raise OptionError(
                    f"job_extra_directives: {option} belongs to {owner}; set that instead "
                    f"(or take {option} over with job_directives_skip=[{option!r}])"
                )
            lines.append(self._line(option, value))
        return "\n".join(lines)

    def _line(self, option: str, value: object) -> str:
        if value is None:
            return f"{self.syntax.prefix} {option}"
        if " " in option:  # -l walltime
            letter, name = option.split(" ", 1)
            return f"{self.syntax.prefix} {letter} {self.syntax.quote(f'{name}={value}')}"
        return f"{self.syntax.prefix} {option}{'=' if option.startswith('--') else ' '}{self.syntax.quote(value)}"


def script_name(system: str, kind: str, group: str = "default") -> str:
    """File name of the script of one kind of job: ``worker.sbatch``, ``worker-GROUP.sbatch`` for a group of workers with a name."""
    name = Path(_template(system, kind)).stem
    return name if group == "default" else name.replace(kind, f"{kind}-{group}", 1)


def _template(system: str, kind: str) -> str:
    return next(path.name for path in sorted((templates() / system).glob(f"{kind}.*.j2")))


def render(system: str, kind: str, options: Options, directory: Path, group: str = "default", *, command: str = "") -> str:
    """Return the text of a job script.

    Parameters
    ----------
    system : str
        The batch system: ``"slurm"``, ``"pbs"``, ``"local"``.
    kind : str
        ``"scheduler"`` or ``"worker"``.
    options : Options
    directory : Path
        The cluster's directory.
    group : str, default "default"
        The group of workers that ``options.worker`` belongs to.
    command : str, optional
        What the job runs, by the name of its template: ``"check"``. Default: that of its kind.

    Raises
    ------
    OptionError
        A directive that cannot be.
    """
    job: JobOptions | None = options.worker if kind == "worker" else options.scheduler
    if job is None:
        raise OptionError("scheduler='local': the scheduler runs in this process, there is no scheduler job")
    directives = Directives(_SYNTAX[system], job.job_directives_skip, job.job_extra_directives)
    whole_nodes = job.gpu_request == "none"
    if system == "pbs" and job.memory is None and not whole_nodes and directives.asked("-l mem"):
        job = replace(job, memory=_PBS_MEMORY * max(1, job.gpus_per_node))
    text = (
        _environment(system, options)
        .get_template(_template(system, kind))
        .render(
            _context(system, kind, options, directory),
            job=job,
            script=directory / script_name(system, kind, group),
            command=f"{command or kind}_command.j2",
            directive=directives.add,
            further_directives=directives.further,
            asked=directives.asked,
        )
    )
    return _squeeze(text)


def render_bundle(system: str, options: Options, directory: Path) -> dict[str, str]:
    """Return by file name what starts a cluster without Python: both job scripts, ``launch.sh``, ``stop.sh``, ``README``.

    Parameters
    ----------
    system : str
        ``"slurm"`` or ``"pbs"``.
    options : Options
    directory : Path
        The cluster's directory.
    """
    jobs = {script_name(system, kind): render(system, kind, options, directory) for kind in ("scheduler", "worker")}
    context = _context(system, "bundle", options, directory) | {
        "scheduler_script": script_name(system, "scheduler"),
        "worker_script": script_name(system, "worker"),
        "cls": {"slurm": "SlurmGPUCluster", "pbs": "PBSGPUCluster"}[system],
    }
    environment = _environment(system, options)
    templates_ = {"launch.sh": f"{system}/launch.sh.j2", "stop.sh": f"{system}/stop.sh.j2", "README": "bundle/README.j2"}
    return jobs | {name: environment.get_template(template).render(context) for name, template in templates_.items()}


def render_single(options: Options, directory: Path, program: Sequence[str]) -> str:
    """Return the text of one Slurm script that runs scheduler, workers and a program in one allocation.

    Parameters
    ----------
    options : Options
        ``options.worker.nodes_per_job`` nodes are asked for.
    directory : Path
        The beginning of the path of the cluster's directory; the job's id follows.
    program : sequence of str
        Its command line.
    """
    directives = Directives(_SYNTAX["slurm"], options.worker.job_directives_skip, options.worker.job_extra_directives)
    text = (
        _environment("slurm", options)
        .get_template("slurm/single.sbatch.j2")
        .render(
            _context("slurm", "single", options, directory),
            job=options.worker,
            scheduler=options.scheduler,
            program=program,
            script=directory.with_name(f"{directory.name}.sbatch"),
            directive=directives.add,
            further_directives=directives.further,
            asked=directives.asked,
        )
    )
    return _squeeze(text)


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
    text = _environment(system, options).get_template(f"{kind}_command.j2").render(_context(system, kind, options, directory), job=job)
    return text.replace('"$python"', shell_word(job.python)).replace('"$directory"', shell_word(directory)).strip()


def _check_ownership(option: str, *paths: Path) -> None:
    """Refuse what jobs would run and others can change."""
    try:
        for path in paths:
            check(path, group_may_write=True)
    except NotTrusted as error:
        raise OptionError(f"{option}: {error}") from error


def _environment(system: str, options: Options) -> jinja2.Environment:
    own = options.cluster.template_directory
    _check_ownership("template_directory", *([own, *own.rglob("*")] if own else ()))
    for job in (options.worker, options.scheduler):
        if job is not None and isinstance(job.job_script_prologue, Path) and job.job_script_prologue.exists():
            _check_ownership("job_script_prologue", job.job_script_prologue)
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*([own] if own else []), templates() / system, templates()]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        keep_trailing_newline=True,
    )
    env.filters |= {
        "shell": shell_word,
        "directive": directive_value,
        "seconds": lambda value: f"{value:g}",
        "escape_percent": lambda value: str(value).replace("%", "%%"),
        "slurm_time": slurm_time,
        "slurm_memory": slurm_memory,
        "pbs_time": pbs_time,
        "pbs_memory": pbs_memory,
        "pbs_name": pbs_name,
        "pbs_prefix": pbs_prefix,
        "launcher": _launcher,
        "resources": lambda value: ",".join(f"{name}={amount:g}" for name, amount in value),
        "flag": _flag,
    }
    env.tests["string_list"] = lambda value: isinstance(value, tuple)
    return env


def _context(system: str, kind: str, options: Options, directory: Path) -> dict[str, Any]:
    return {
        "system": system,
        "kind": kind,
        "cluster": options.cluster,
        "directory": directory,
        "logs": options.cluster.log_directory or directory / "logs",
        "variable": VARIABLE,
        "rmm_pool": options.worker.rmm_pool_size is not None,
        "ucx_environment": lambda job: settings.environment(options.worker, job.ucx_env),
    }


def slurm_time(seconds: int | None) -> str | None:
    """Return Slurm's ``[days-]hours:minutes:seconds``."""
    if seconds is None:
        return None
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hours:02}:{minutes:02}:{rest:02}"


def slurm_memory(size: int | None) -> str | None:
    """Return Slurm's amount of memory, in GiB where that is exact, else in MiB rounded up; its units are powers of 1024."""
    return None if size is None else _binary(size)


def _binary(size: int) -> str:
    return f"{size // 2**30}G" if size % 2**30 == 0 else f"{math.ceil(size / 2**20)}M"


def pbs_time(seconds: int | None) -> str | None:
    """Return PBS's ``hours:minutes:seconds``, which has no days."""
    if seconds is None:
        return None
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def pbs_memory(size: int | None) -> str | None:
    """Return PBS's amount of memory; its units are powers of 1024 too (``man pbs_resources``)."""
    return None if size is None else f"{_binary(size).lower()}b"


def _launcher(command: str, nodes: int) -> str:
    """Return an MPI launcher's command line for so many nodes."""
    program, *arguments = shlex.split(command)
    return " ".join(map(shell_word, [program, "-n", nodes, *arguments]))


def _flag(flag: str, value: object) -> str:
    """Return an option of the worker command; a boolean one has its opposite by ``--disable-`` or by being left out."""
    if value is True:
        return flag
    if value is False:
        return flag.replace("--enable-", "--disable-", 1) if flag.startswith("--enable-") else ""
    return f"{flag} {shell_word(value)}"


def _squeeze(text: str) -> str:
    """Remove the empty lines that unset options left between the directives; the body stays as it is."""
    lines = text.splitlines()
    last = max((i for i, line in enumerate(lines) if line.startswith(tuple(syntax.prefix for syntax in _SYNTAX.values()))), default=0)
    return "\n".join([line for line in lines[: last + 1] if line.strip()] + lines[last + 1 :]) + "\n"


def _refuse_control_characters(text: str) -> None:
    if bad := next((c for c in text if ord(c) < 32 or ord(c) == 127), None):
        raise OptionError(f"{text!r} holds the control character {bad!r}, which no directive can: remove it")
