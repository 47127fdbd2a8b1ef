"""What ``import hpcgpu`` costs over a bare start of Python: the median of interleaved runs."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 30


def seconds(code: str) -> float:
    """Time one start of Python."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - started


def main() -> None:
    """Measure and print."""
    seconds("import hpcgpu")  # compile
    bare, ours, distributed = [], [], []
    for _ in range(RUNS):
        bare.append(seconds("pass"))
        ours.append(seconds("import hpcgpu"))
        distributed.append(seconds("import distributed"))
    start = statistics.median(bare)
    for name, times in {"bare Python": bare, "import hpcgpu": ours, "import distributed": distributed}.items():
        median = statistics.median(times)
        print(
            f"{name:20} {1000 * median:7.1f} ms, {1000 * (median - start):7.1f} ms over the bare start, ratio "
            f"{median / start:.2f}"
        )


if __name__ == "__main__":
    main()
