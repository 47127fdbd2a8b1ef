"""Site profiles: the options that jobs need at a site, as data.

``NAME.yaml`` is in the user's own directory, in the environment (``etc/hpcgpu/profiles``, where a site's administrators
may install it), in hpcgpu/profiles, or in the distribution that adds its batch system. The first directory that has the
file counts.

A profile has ``about``, ``source`` and ``date`` of its content, the batch ``system``, the ``options`` that it sets, the
options that the user must set (``needs``), and the site's ``advice`` on containers and Jupyter.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hpcgpu.batch import system_registry
from hpcgpu.errors import NotTrusted, OptionError
from hpcgpu.options.values import profile_name
from hpcgpu.posix.ownership import check

#: Sites whose GPUs are not NVIDIA's: maker of the GPUs, by name.
_OTHER_GPUS = {
    **dict.fromkeys(("frontier", "lumi", "setonix", "dardel", "adastra", "elcapitan", "tuolumne", "hawk"), "AMD"),
    **dict.fromkeys(("aurora", "dawn", "supermuc-ng2"), "Intel"),
}
_SHIPPED = Path(__file__).parent
_KEYS = {"about", "source", "date", "system", "host", "needs", "notes", "advice", "options"}
#: The topics of a site's advice.
TOPICS = ("containers", "jupyter")


@dataclass(frozen=True)
class Advice:
    """What a site recommends, in our words.

    Attributes
    ----------
    says, source : str
    read : str
        When the source was read. The source itself may be older.
    """

    says: str
    source: str
    read: str


@dataclass(frozen=True)
class Profile:
    """The options and the advice for one site.

    Attributes
    ----------
    name, about, source, date, notes : str
    system : str
        The batch system.
    needs : tuple of str
        Options that the user must give.
    options : mapping
        Options by name, as in dask's configuration.
    advice : mapping of str to Advice
        By topic, see `TOPICS`.
    host : str
        The login node that a laptop uses by ssh; empty if the profile is for programs on the login node.
    path : Path
        The file.
    """

    name: str
    about: str
    source: str
    date: str
    system: str
    path: Path
    needs: tuple[str, ...] = ()
    notes: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    advice: Mapping[str, Advice] = field(default_factory=dict)
    host: str = ""

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise `OptionError` when the user has not given what the site needs."""
        if missing := [name for name in self.needs if given.get(name) is None]:
            raise OptionError(f"profile {self.name!r} needs {', '.join(missing)}: {self.about} {self.notes}".strip())


def user_directory() -> Path:
    """Return the directory of the user's own profiles."""
    return Path("~/.config/hpcgpu/profiles").expanduser()


def shipped() -> list[str]:
    """Return the names of the profiles that come with hpcgpu."""
    return sorted(path.stem for path in _SHIPPED.glob("*.yaml"))


def names() -> list[str]:
    """Return the names of all profiles."""
    return sorted({path.stem for directory in _directories() for path in directory.glob("*.yaml")})


def load(name: str) -> Profile:
    """Read a profile.

    Parameters
    ----------
    name : str

    Raises
    ------
    OptionError
        There is none, or it cannot be read.
    """
    profile_name("profile", name)
    path = next((file for directory in _directories() if (file := directory / f"{name}.yaml").is_file()), None)
    if path is None:
        if maker := _OTHER_GPUS.get(name.lower()):
            raise OptionError(
                f"profile={name!r}: this site's GPUs are made by {maker}. hpcgpu cannot use them, because its GPU "
                "workers need NVIDIA's CUDA. For CPU workers, leave out profile and set gpus_per_node=0"
            )
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {near[0]!r}? The" if near else "the"
        raise OptionError(
            f"no profile {name!r}: {hint} profiles are {', '.join(names())}. On a login node of your site, `hpcgpu "
            f"profiles new {name}` drafts one"
        )
    return _read(name, path)


def _read(name: str, path: Path) -> Profile:
    try:
        if path.parent == user_directory():  # options such as `job_script_prologue` run in the jobs
            check(path, group_may_write=True)
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except NotTrusted as error:
        raise OptionError(f"profile {name!r}: {error}") from error
    except (OSError, yaml.YAMLError) as error:
        raise OptionError(f"profile {name!r} cannot be read from {path}: {error}") from error
    if (
        not isinstance(content, dict)
        or not {"system", "options"} <= content.keys()
        or not isinstance(content["options"], dict)
    ):
        raise OptionError(f"profile {name!r} in {path} must hold `system` and `options`")
    if unknown := set(content) - _KEYS:
        raise OptionError(
            f"profile {name!r} in {path}: unknown keys {', '.join(sorted(map(str, unknown)))}; the keys are "
            f"{', '.join(sorted(_KEYS))}"
        )
    return Profile(
        name=name,
        about=str(content.get("about", "")),
        source=str(content.get("source", "")),
        date=str(content.get("date", "")),
        system=str(content["system"]),
        path=path,
        host=str(content.get("host") or ""),
        needs=tuple(str(option).replace("-", "_") for option in content.get("needs") or ()),
        notes=str(content.get("notes", "")),
        options=content["options"],
        advice=_advice(name, path, content.get("advice") or {}),
    )


def _advice(name: str, path: Path, given: Any) -> dict[str, Advice]:
    keys = {"says", "source", "read"}
    if not isinstance(given, dict) or not all(
        topic in TOPICS and isinstance(one, dict) and one.keys() == keys for topic, one in given.items()
    ):
        raise OptionError(
            f"profile {name!r} in {path}: `advice` has {' and '.join(TOPICS)}, each with {', '.join(sorted(keys))}"
        )
    return {topic: Advice(**{key: str(text) for key, text in one.items()}) for topic, one in given.items()}


def _directories() -> Iterator[Path]:
    # A user who can write to the environment can change the code that reads this. So profiles there need no other
    # check.
    yield from (user_directory(), Path(sys.prefix, "etc", "hpcgpu", "profiles"), _SHIPPED)
    yield from (one.profiles for one in system_registry.systems() if one.profiles is not None)
