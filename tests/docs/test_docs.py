"""The user guide builds without a warning, its examples run, and what it shows of options exists."""

from __future__ import annotations

import ast
import html
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.batch.pbs.options import PBSWorkerOptions
from hpcgpu.batch.slurm.options import SlurmWorkerOptions
from hpcgpu.cli import main
from hpcgpu.configuration.resolve import resolve
from hpcgpu.errors import OptionError
from hpcgpu.options.declare import names
from hpcgpu.options.shared_options_and_defaults import ClusterOptions
from hpcgpu.store import create_directory

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.rst"))]
FOLDERS = [
    "hpcgpu",
    "templates",
    "tests",
    "docs",
    "ci",
    "conda",
    "jupyter-config",
    "jupyter-data",
    "examples",
    "benchmarks",
]
SYSTEMS = {"SlurmGPUCluster": "slurm", "PBSGPUCluster": "pbs", "LocalGPUCluster": "local"}


def blocks(page: Path) -> Iterator[tuple[int, str, str]]:
    """Line, how it is to run, and text of each block of Python on a page."""
    text = page.read_text()
    if page.suffix == ".md":
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            yield text[: match.start()].count("\n") + 1, "", match[1]
        return
    pattern = r"^( *)\.\. code-block:: python\n((?:\1 +:.*\n)*)\n((?:\1 +.*\n|\n)+)"
    for match in re.finditer(pattern, text, re.MULTILINE):
        how = re.search(r":class: (.*)", match[2])
        yield text[: match.start()].count("\n") + 1, how[1] if how else "", textwrap.dedent(match[3])


BLOCKS = [pytest.param(how, text, id=f"{page.name}:{line}") for page in PAGES for line, how, text in blocks(page)]


def words_of(page: Path) -> str:
    """What a reader sees of a page, and copies: not what the theme puts around it."""
    article = re.search(r"<article.*</article>", page.read_text(), re.DOTALL)
    assert article
    return html.unescape(re.sub(r"<[^>]*>", "", article[0]))


def test_the_pages_show_scripts_from_the_templates(built: Path) -> None:
    assert "--gres=gpu:a100:4" in words_of(built / "scripts.html")


def test_what_is_copied_from_the_text_of_an_option_works(built: Path) -> None:
    shown = words_of(built / "options.html")
    texts = [
        f.metadata["doc"] for cls in (ClusterOptions, SlurmWorkerOptions, PBSWorkerOptions) for f in names(cls).values()
    ]
    flags = {flag for text in texts for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}
    assert "--gres" in flags
    assert [flag for flag in flags if flag not in shown] == []


@pytest.mark.parametrize("page", [page.stem for page in PAGES if page.suffix == ".rst"])
def test_no_page_has_quotes_or_dashes_that_a_shell_does_not_take(built: Path, page: str) -> None:
    assert re.findall(".{0,30}[\u2018\u2019\u201c\u201d\u2013\u2014].{0,30}", words_of(built / f"{page}.html")) == []


@pytest.mark.parametrize(("how", "text"), BLOCKS)
def test_the_options_in_an_example_exist(how: str, text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
        if name not in SYSTEMS or not isinstance(node, ast.Call):
            continue
        given = {
            str(k.arg): ast.literal_eval(k.value)
            for k in node.keywords
            if k.arg not in ("asynchronous", "host") and not isinstance(k.value, ast.Name)  # a function of the example
        }
        resolve(SYSTEMS[name], given)


def run(text: str, home: Path) -> str:
    """What an example prints."""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=home, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("text", [pytest.param(p.values[1], id=p.id) for p in BLOCKS if p.values[0] == "runs"])
def test_an_example_runs(text: str, home: Path) -> None:
    run(text, home)


@pytest.mark.parametrize("text", [pytest.param(p.values[1], id=p.id) for p in BLOCKS if "pretended" in p.values[0]])
def test_an_example_runs_on_pretended_gpus_and_prints_what_the_page_promises(
    text: str, queue: LocalQueue, home: Path, fake_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "pretended"))
    said = run(text, home)
    page = (ROOT / "docs" / "scheduler_gpu.rst").read_text()
    assert "made in a task: 10" in said and textwrap.indent(said, "   ") in page, said


@pytest.mark.parametrize("module", ["tests/gpu/test_gpu_libraries.py", "tests/local/test_library_examples.py"])
def test_an_example_that_needs_a_library_is_run_on_gpus_and_with_a_stand_in(module: str) -> None:
    needed = {p.values[0].split()[1] for p in BLOCKS if p.values[0].startswith("needs ")}
    calls = [node for node in ast.walk(ast.parse((ROOT / module).read_text())) if isinstance(node, ast.Call)]
    ran = {ast.literal_eval(call.args[0]) for call in calls if ast.unparse(call.func) == "run"}
    assert needed and needed <= ran


def test_there_are_examples_that_run() -> None:
    assert sum(bool(p.values[0]) for p in BLOCKS) >= 4


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert "://" in target or (ROOT / target).exists(), target


@pytest.mark.parametrize(
    ("page", "system", "options"),
    [
        ("options", "slurm", {"quue": "gpu"}),
        ("options", "slurm", {"processes": 4}),
        ("options", "slurm", {"dashboard_address": ":0"}),
        ("options", "slurm", {"walltime": "25:99"}),
        ("options", "slurm", {"memory": "10 parsecs"}),
        ("options", "pbs", {"qos": "high"}),
        ("options", "slurm", {"queue": "a\nb"}),
        ("options", "slurm", {"worker_extra_args": ["--nthreads", "2"]}),
        ("options", "slurm", {"protocol": "ucx", "scheduler": {"gpus_per_node": 0}}),
        ("jobqueue", "slurm", {"processes": 4}),
        ("jobqueue", "slurm", {"n_workers": 4}),
        ("jobqueue", "slurm", {"job_extra": ["--exclusive"]}),
        ("jobqueue", "slurm", {"worker_extra_args": ["--lifetime", "1h"]}),
    ],
)
def test_an_option_is_refused_in_the_words_of_the_page(page: str, system: str, options: dict[str, object]) -> None:
    with pytest.raises(OptionError) as error:
        resolve(system, options)
    assert f"   {error.value}\n" in (ROOT / "docs" / f"{page}.rst").read_text()


@pytest.mark.parametrize(
    "page", ["docs/architecture.md", "docs/development.rst", "docs/releasing.rst", "CONTRIBUTING.md"]
)
def test_the_files_that_a_page_names_exist(page: str) -> None:
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w/.-]*)`", (ROOT / page).read_text())
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_page_on_architecture_has_every_layer_in_its_order() -> None:
    shown = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    order = re.search(
        r"^LAYERS = (\(.*?\))$", (ROOT / "tests" / "unit" / "test_layers.py").read_text(), re.MULTILINE | re.DOTALL
    )
    assert order
    assert shown == [name for name in ast.literal_eval(order[1]) if name != "__main__"]


def test_the_configuration_on_the_page_is_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    text = (ROOT / "docs" / "configuration.rst").read_text()
    block = re.search(r"code-block:: yaml\n\n((?:   .*\n|\n)+)", text)
    assert block
    import dask

    with dask.config.set(yaml.safe_load(textwrap.dedent(block[1]))):
        options = resolve("slurm", {})
    assert (options.worker.queue, options.worker.gpus_per_node) == ("gpu", 4)
    assert options.cluster.cluster_directory == tmp_path / "hpcgpu"
    assert options.scheduler is not None and options.scheduler.walltime == 12 * 3600


def test_the_example_of_the_flights(home: Path) -> None:
    example = [sys.executable, str(ROOT / "examples" / "flights.py")]
    done = subprocess.run(example, capture_output=True, text=True, cwd=home, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "Hawaiian Airlines Inc." in done.stdout


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command line of hpcgpu that stands in a block of a page, and its words."""
    for page in PAGES:
        pattern = r"^```\w*\n([^`]*)^```" if page.suffix == ".md" else r"^ *\.\. code-block:: bash\n\n((?: +.*\n|\n)+)"
        for match in re.finditer(pattern, page.read_text(), re.MULTILINE):
            for line in match[1].splitlines():
                if line.strip().startswith("hpcgpu "):
                    words = shlex.split(line, comments=True)
                    yield f"{page.name}: {' '.join(words)}", words[1:]


@pytest.mark.parametrize("words", [pytest.param(words, id=name) for name, words in commands()])
def test_a_command_line_in_the_pages_is_one(words: list[str], home: Path) -> None:
    create_directory.claim(home / "clusters" / "demo", lambda earlier: [], system="local")  # the cluster of the pages
    name, *arguments = words
    command: click.Command = main.commands[name]
    if isinstance(command, click.Group):
        name, *arguments = arguments
        command = command.commands[name]
    command.make_context(name, arguments)


def test_there_are_command_lines() -> None:
    assert len(list(commands())) > 10, list(commands())


def test_what_the_page_promises_of_times_in_yaml_is_true() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.rst").read_text()
    said = re.search(r"in quotes: YAML reads (\S+) as the number (\d+)", page)
    assert said is not None and yaml.safe_load(said[1]) == int(said[2])
