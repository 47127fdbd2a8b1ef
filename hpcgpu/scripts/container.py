"""Containers as the jobs' environment: the line of a job script that runs the Dask processes in a container.

Each container runtime has one template, which is a line of bash with Jinja2 expressions. The job script sets the values
that differ from job to job as variables of bash, and the Jinja2 expressions are quoted before they are filled in.

A template can use:

``"$image"``
    The option `container`.
``"${mounts[@]}"``
    The mounts, each as ``FROM:TO`` or ``FROM:TO:ro``. ``"${mounts[@]/#/--bind=}"`` puts ``--bind=`` before each.
``{{ arguments }}``
    The option `container_args`, quoted, with a space before each.
``{{ container_mounts }}``
    The entries of the option `container_mounts`, quoted: for a runtime such as Shifter, whose site mounts the rest.
``"${variables[@]}"``
    Names of the variables that the processes need, some with ``*`` at the end, for runtimes that pass on only the
    variables that are named.
``{{ own_variables }}``
    Names of the variables of the options `env` and `ucx_env`.
``$infiniband``, ``$environment``
    ``/dev/infiniband``, and the file ``ch/environment`` of the image; empty where there is none.
``$temporary``
    `TMPDIR` in the container, for a runtime that mounts only on directories that the image has: ``/var/tmp`` where the
    image lacks the node's.
``{{ gpus }}``, ``{{ nodes }}``, ``{{ cores }}``
    GPUs of a node, nodes of the job, cores of a node (none if they are not requested).
``{{ launcher }}``
    The command that starts a process on each node of a job of several nodes. If a template does not contain it, it is
    written before the template.
"""

from __future__ import annotations

import re
import shlex
import string
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import jinja2

from hpcgpu.batch import system_registry
from hpcgpu.errors import OptionError
from hpcgpu.options.shared_options_and_defaults import JobOptions, Options, WorkerOptions

_APPTAINER = '%s exec{{ " --nv" if gpus }} "${mounts[@]/#/--bind=}" --pwd "$PWD"{{ arguments }} "$image"'
# keep-groups: directories of projects are often open to a supplementary group alone (podman-run(1)).
_PODMAN = (
    "%s --rm --network=host --uts=host --cgroups=disabled --ulimit=host --volume=/dev/shm:/dev/shm --userns=keep-id "
    '--group-add=keep-groups --umask=0077 --security-opt=label=disable "${mounts[@]/#/--volume=}" --workdir="$PWD"'
    ' "${variables[@]/#/--env=}" --entrypoint= ${infiniband:+"--device=$infiniband"}%s "$image"'
)
#: Commands of container runtimes, by name.
RUNTIMES: Mapping[str, str] = {
    "apptainer": _APPTAINER % "apptainer",
    "singularity": _APPTAINER % "singularity",
    "charliecloud": (
        'env --unset=TMPDIR USER="${USER:-$(id -un)}" ch-run '
        '{% if "LD_LIBRARY_PATH" not in own_variables %}--unset-env=LD_LIBRARY_PATH {% endif %}'
        '{% if "PATH" not in own_variables %}--set-env=PATH=/usr/local/bin:/usr/bin:/bin {% endif %}'
        '${environment:+"--set-env=$environment"} --set-env=TMPDIR="${temporary}" --env-no-expand '
        '"${mounts[@]/#/--bind=}" --cd="$PWD"{{ arguments }} "$image" --'
    ),
    # runc, which some sites have for a default, refuses --cgroups=disabled
    "podman": _PODMAN % ("podman --runtime=crun run{{ ' --device=nvidia.com/gpu=all' if gpus }}", "{{ arguments }}"),
    # its own options stand before the first `--`, which it removes (podman_hpc.py, of click)
    "podman-hpc": _PODMAN % ("podman-hpc run{{ ' --gpu' if gpus }}{{ arguments }} --", ""),
    "shifter": (
        'shifter{{ " --module=gpu" if gpus }}{% for mount in container_mounts %} --volume={{ mount }}{% endfor %} '
        '--workdir="$PWD"{{ arguments }} --image="$image"'
    ),
}
#: Variables that the processes in a container need, for runtimes that pass on only those that are named.
_VARIABLES = (
    *("HOME", "USER", "LOGNAME", "TMPDIR", "LANG", "LC_*", "TZ", "PYTHONNOUSERSITE", "PYTHONHASHSEED"),
    *("SLURM*", "PBS_*", "PMI*", "PALS_*", "OMPI_*", "HPCGPU_*", "DASK_*", "UCX*", "CUDA_*", "NVIDIA_*", "NCCL_*"),
    *("RMM_*", "CUDF_*", "KVIKIO_*", "LIBCUDF_*", "NUMBA_*", "CUPY_*", "MALLOC_*", "OMP_*", "MKL_*", "OPENBLAS_*"),
)
#: Directory in the cluster directory with a copy of the hpcgpu that rendered the scripts, and nothing else. Its name
#: has the version of Python that the copy is for.
HOST_COPY = f"python{sys.version_info.major}.{sys.version_info.minor}"
#: Variables of the node's own Python, which a Python in the container must not read. A path to the node's CUDA would
#: keep numba from finding CUDA in the image.
_HOST_PYTHON = (
    *("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONSTARTUP", "PYTHONEXECUTABLE", "VIRTUAL_ENV"),
    *("CONDA_PREFIX", "CONDA_DEFAULT_ENV", "LD_PRELOAD", "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"),
)


#: Charliecloud gives the node's /tmp to the container. PBS's TMPDIR differs from job to job, so no image has it.
_TEMPORARY = """\
temporary=$TMPDIR
if [[ $TMPDIR/ != /tmp/* && -d $TMPDIR && ! -d $image$TMPDIR ]]; then
    temporary=/var/tmp
    for i in "${!mounts[@]}"; do
        [[ ${mounts[i]} != "$TMPDIR"[:/]* ]] || unset "mounts[i]"
    done
    mounts+=("$TMPDIR:$temporary")
fi"""


class Container:
    """The container of one kind of job.

    Parameters
    ----------
    system : System
    options : Options
        Of the cluster.
    job : JobOptions
    directory : Path
        The cluster's directory.

    Raises
    ------
    OptionError
        There is no such runtime, or it cannot use a value.
    """

    def __init__(self, system: system_registry.System, options: Options, job: JobOptions, directory: Path) -> None:
        assert job.container is not None
        self.job = job
        self.image = job.container
        runtimes = {**RUNTIMES, **system.container_runtimes, **dict(options.cluster.container_runtimes)}
        if job.container_runtime not in runtimes:
            raise OptionError(
                f"container_runtime={job.container_runtime!r} is not known on {system.title}: write one of "
                f"{', '.join(sorted(runtimes))}, or add a template of that name to container_runtimes"
            )
        self._template = runtimes[job.container_runtime]
        if bad := next((c for c in ":,\n" if c in str(directory)), None):
            raise OptionError(
                f"container: the cluster directory {str(directory)!r} contains {bad!r}, which container runtimes use "
                "as a separator: choose another cluster_directory"
            )
        self.host_python = [name for name in _HOST_PYTHON if name not in dict(job.env)]

    @property
    def places(self) -> list[str]:
        """Directories of the node that the container has under the same path, as words of bash."""
        return ['"$HOME"', '"$PWD"', '"$TMPDIR"', '"$directory"', *([self.local] if self.local else [])]

    @property
    def local(self) -> str:
        """The option `local_directory`, as a word of bash; empty if it is not set."""
        return shell_path(self.job.local_directory) if self.job.local_directory else ""

    @property
    def mounts(self) -> list[str]:
        """The option `container_mounts`, as words of bash."""
        return [":".join(map(shell_path, mount.split(":"))) for mount in self.job.container_mounts]

    @property
    def program(self) -> str:
        """The program that must be installed on the node: the first word of the command that is not for ``env``."""
        words = self.command("").split()
        return next(word for word in words if word != "env" and not re.match(r"-|[A-Za-z_][A-Za-z_0-9]*=", word))

    def command(self, launcher: str) -> str:
        """Return the command line that precedes the command in the container.

        Parameters
        ----------
        launcher : str
            The command that starts a process on each node of a job of several nodes; it ends with a space. Empty for
            one node.
        """
        environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
        try:
            line = environment.from_string(self._template).render(
                arguments="".join(f" {shlex.quote(argument)}" for argument in self.job.container_args),
                container_mounts=self.mounts,
                own_variables=self._own_variables,
                gpus=self.job.gpus_per_node,
                nodes=self.job.nodes_per_job if isinstance(self.job, WorkerOptions) else 1,
                cores=self.job.cores,
                launcher=launcher.strip(),
            )
        except jinja2.TemplateError as error:
            raise OptionError(f"container_runtimes[{self.job.container_runtime!r}]: {error}") from error
        if re.search(r"\blauncher\b", self._template):  # the template starts the processes of all nodes
            launcher = ""
        return f"{launcher}{line.strip()} \\\n    "

    @property
    def _own_variables(self) -> list[str]:
        return [name for name, _ in (*self.job.env, *self.job.ucx_env)]

    @property
    def definitions(self) -> list[str]:
        """Lines of bash for the variables that only some templates have."""
        variables = " ".join(shlex.quote(name) for name in dict.fromkeys((*_VARIABLES, *self._own_variables)))
        lines = {
            "variables": f"variables=({variables})",
            "infiniband": "infiniband=/dev/infiniband\n[ -e $infiniband ] || infiniband=",
            "temporary": _TEMPORARY,
            "environment": 'environment=$image/ch/environment\n[ -e "$environment" ] || environment=',
        }
        return [line for name, line in lines.items() if f"${{{name}" in self._template]


def shell_path(path: str) -> str:
    """Return a path as one word of bash, which replaces ``~`` and variables as `hpcgpu.posix.paths.expand` does."""
    home = re.match(r"~[^/$]*", path)
    beginning = "" if home is None else '"$HOME"' if home[0] == "~" else home[0]
    rest = path[home.end() :] if home is not None else path

    def quoted(text: str) -> str:
        return re.sub(r'([\\"$`])', r"\\\1", text)

    parts, last = [], 0
    for match in string.Template.pattern.finditer(rest):
        parts.append(quoted(rest[last : match.start()]))
        name = match["named"] or match["braced"]
        parts.append(f"${{{name}:?}}" if name else quoted("$"))
        last = match.end()
    if not beginning and not last:
        return shlex.quote(path)
    body = "".join([*parts, quoted(rest[last:])])
    return f'{beginning}"{body}"' if body else beginning


def provide(directory: Path, *jobs: JobOptions | None) -> None:
    """Put a copy of this hpcgpu, and of nothing else, into the cluster directory, for images that lack it.

    Parameters
    ----------
    directory : Path
        The cluster's directory.
    *jobs : JobOptions or None
        Nothing is copied if none of these jobs has a container.
    """
    target = directory / HOST_COPY
    if not any(job is not None and job.container for job in jobs) or target.exists():
        return
    target.mkdir(mode=0o700)
    _copy(Path(__file__).parents[1], target / "hpcgpu")
    _copy(system_registry.common_templates(), target / "hpcgpu" / "templates")
    try:
        about = distribution("hpcgpu")
    except PackageNotFoundError:
        return
    metadata = target / f"hpcgpu-{about.version}.dist-info"
    metadata.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (metadata / name).write_text(about.read_text(name) or "")


def _copy(source: Path, target: Path) -> None:
    for file in source.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            copy = target / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
