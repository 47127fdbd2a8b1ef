"""A snapshot of a cluster as static HTML, for places without a widget and for a notebook that is read later.

It has no script and no style sheet, because viewers of notebooks remove both.
"""

from __future__ import annotations

import time

from hpcgpu.dask_scheduler.rpc_types import GroupState
from hpcgpu.display.counts_and_durations import duration
from hpcgpu.display.html import html
from hpcgpu.display.job_table import JobTable
from hpcgpu.display.text_columns import bar
from hpcgpu.existing_clusters.snapshot import GPUInfo, Snapshot

#: If there are more GPUs than this, only sums are shown.
_GPUS = 32
_COLUMNS = ("GPU of", "node", "utilisation", "memory", "power", "")
_GIB = 2**30
_PICTURE = """<div><p><b>{{ name }}</b>: {{ state }}</p>
{{ paragraphs(about) }}{{ paragraphs(messages, bold=true) }}{{ paragraphs(groups) }}
{{ jobs | safe }}{{ paragraphs(gpus) }}{% if rows %}{{ table(columns, rows) }}{% endif %}</div>"""


def picture(snapshot: Snapshot) -> str:
    """Return the snapshot as HTML."""
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
    messages = [
        *paused,
        *snapshot.restart,
        *filter(None, [snapshot.end]),
        *snapshot.warnings,
        *filter(None, [snapshot.problem]),
    ]
    taken = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(snapshot.time)).strip()
    about = f"The last known state, of {taken}. This is a picture: it does not change."
    return html(
        _PICTURE,
        name=snapshot.name,
        state=snapshot.state,
        about=[about, "; ".join(words)],
        messages=messages,
        groups=map(_group, snapshot.groups),
        jobs=JobTable(snapshot.jobs)._repr_html_() if snapshot.jobs else "",
        gpus=_gpus(snapshot),
        columns=_COLUMNS,
        rows=[_row(gpu, snapshot.time) for gpu in snapshot.devices] if len(snapshot.devices) <= _GPUS else [],
    )


def _group(group: GroupState) -> str:
    jobs = "no size yet" if group["target"] is None else f"{group['target']} jobs"
    adapts = f", adapts from {group['minimum'] or 0} to {group['maximum']}" if group["maximum"] is not None else ""
    return f"{group['name']}: {jobs}{adapts}{'; ' + group['reason'] if group['reason'] else ''}"


def _gpus(snapshot: Snapshot) -> list[str]:
    gpus, used = snapshot.devices, snapshot.utilization
    words = [f"{len(gpus):,} GPUs", f"{snapshot.idle:,} idle"]
    words += [] if used is None else [f"mean utilisation {used:.0f} %"]
    return [", ".join(words)] if gpus else []


def _row(gpu: GPUInfo, now: float) -> tuple[str, ...]:
    used = "not known" if gpu.utilization is None else f"{bar(gpu.utilization / 100, 10)} {gpu.utilization:.0f} %"
    memory = "not known"
    if gpu.memory_used is not None and gpu.memory_total:
        memory = f"{gpu.memory_used / _GIB:.1f} of {gpu.memory_total / _GIB:.0f} GiB"
    power = "" if gpu.power is None else f"{gpu.power:.0f} W"
    idle = "" if gpu.idle_since is None else f"idle for {duration(max(0.0, now - gpu.idle_since))}"
    return gpu.worker, gpu.node, used, memory, power, idle
