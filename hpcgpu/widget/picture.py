"""A snapshot of a cluster as HTML that stands still: where no widget runs, and in a notebook that is read later.

It has no script and no style sheet, because viewers of notebooks remove both.
"""

from __future__ import annotations

import html
import time
from collections.abc import Iterable

from hpcgpu.display.progress import duration
from hpcgpu.display.table import JobTable
from hpcgpu.remote.snapshot import GPUInfo, Snapshot
from hpcgpu.runtime.wire import GroupState

__all__ = ["picture"]

#: Of more GPUs than this only the sums are shown.
_GPUS = 32
_GIB = 2**30


def picture(snapshot: Snapshot) -> str:
    """Return the HTML."""
    ended = snapshot.state in ("closed", "ended")
    facts = {
        "Workers": f"{snapshot.workers:,}",
        "GPUs": f"{snapshot.gpus:,}",
        "Time left": "" if ended else "not known" if snapshot.time_left is None else duration(snapshot.time_left),
        "GPU hours": f"{snapshot.gpu_hours:.2f}",
        "Dashboard": snapshot.dashboard,
    }
    words = [f"{name}: {text}" for name, text in facts.items() if text]
    paused = [f"Group {group['name']} is paused: {group['paused']}" for group in snapshot.groups if group["paused"]]
    told = [*paused, *snapshot.warnings, *filter(None, [snapshot.problem])]
    taken = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(snapshot.time)).strip()
    parts = [
        f"<p><b>{html.escape(snapshot.name)}</b>: {html.escape(snapshot.state)}</p>",
        f"<p>The last known state, of {html.escape(taken)}. This is a picture: it does not change.</p>",
        f"<p>{html.escape('; '.join(words))}</p>",
        *(f"<p><b>{html.escape(text)}</b></p>" for text in told),
        *(f"<p>{html.escape(_group(group))}</p>" for group in snapshot.groups),
        JobTable(snapshot.jobs)._repr_html_() if snapshot.jobs else "",
        _gpus(snapshot.devices, snapshot.time),
    ]
    return f"<div>{''.join(parts)}</div>"


def _group(group: GroupState) -> str:
    jobs = "no size yet" if group["target"] is None else f"{group['target']} jobs"
    adapts = f", adapts from {group['minimum'] or 0} to {group['maximum']}" if group["maximum"] is not None else ""
    return f"{group['name']}: {jobs}{adapts}{'; ' + group['reason'] if group['reason'] else ''}"


def _gpus(devices: list[GPUInfo], now: float) -> str:
    if not devices:
        return ""
    idle = [gpu for gpu in devices if gpu.idle_since is not None]
    used = _mean(gpu.utilization for gpu in devices)
    words = [f"{len(devices):,} GPUs", f"{len(idle):,} idle", "" if used is None else f"mean utilisation {used:.0f} %"]
    about = f"<p>{', '.join(filter(None, words))}</p>"
    if len(devices) > _GPUS:
        return about
    head = "".join(f"<th>{name}</th>" for name in ("GPU of", "node", "utilisation", "memory", "power", ""))
    rows = "".join(_row(gpu, now) for gpu in devices)
    return f"{about}<table><tr>{head}</tr>{rows}</table>"


def _row(gpu: GPUInfo, now: float) -> str:
    used = "not known" if gpu.utilization is None else f"{_bar(gpu.utilization)} {gpu.utilization:.0f} %"
    memory = "not known"
    if gpu.memory_used is not None and gpu.memory_total:
        memory = f"{gpu.memory_used / _GIB:.1f} of {gpu.memory_total / _GIB:.0f} GiB"
    power = "" if gpu.power is None else f"{gpu.power:.0f} W"
    idle = "" if gpu.idle_since is None else f"idle for {duration(max(0.0, now - gpu.idle_since))}"
    cells = (html.escape(gpu.worker), html.escape(gpu.node), used, memory, power, idle)
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _bar(percent: float) -> str:
    """Draw ten blocks: a viewer may remove what CSS draws."""
    full = round(max(0.0, min(100.0, percent)) / 10)
    return "\N{FULL BLOCK}" * full + "\N{LIGHT SHADE}" * (10 - full)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
