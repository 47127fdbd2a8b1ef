"""Makes a wheel of the hpcgpu that runs, however it was installed: for a host that must have the same version."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import hpcgpu

#: What is not for others: written by Python, and by installers.
_LEFT_OUT = {"__pycache__", "RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
_WHEEL = "Wheel-Version: 1.0\nGenerator: hpcgpu\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def wheel() -> tuple[str, bytes]:
    """Return name and content of the wheel. It lacks the files for JupyterLab, which only a Jupyter server needs."""
    version = hpcgpu.__version__
    info, files = f"hpcgpu-{version}.dist-info", dict(_package())
    distribution = metadata.distribution("hpcgpu")
    for name in ("METADATA", "entry_points.txt"):
        files[f"{info}/{name}"] = (distribution.read_text(name) or "").encode()
    files[f"{info}/WHEEL"] = _WHEEL.encode()
    record = "".join(f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return f"hpcgpu-{version}-py3-none-any.whl", packed.getvalue()


def _package() -> Iterator[tuple[str, bytes]]:
    package = Path(hpcgpu.__file__).parent
    templates = package.parent / "templates"
    for top, prefix in [(package, "hpcgpu"), (templates, "hpcgpu/templates")]:
        if top.is_dir() and not (top is templates and (package / "templates").is_dir()):
            for path in sorted(top.rglob("*")):
                if path.is_file() and not _LEFT_OUT & set(path.parts):
                    yield f"{prefix}/{path.relative_to(top).as_posix()}", path.read_bytes()


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
