"""Time from the line that starts a cluster to its first result: from a laptop, against the login node itself.

``python benchmarks/laptop.py`` starts a real sshd (tests/ssh/sshd_bed.py). The laptop reaches it over a link that takes
25 ms in each direction. Each pair of runs makes a cluster of one CPU worker on the embedded queue, once from a program
on the login node, once from the laptop with ``host=``. The laptop has a shared connection already.

- start: seconds until the constructor returns.
- result: seconds until the first result of a task.
- fetch: seconds for a result of 100 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from slurm_programs import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ssh"), str(ROOT / "tests" / "slurm")]

COLUMNS = ("start", "result", "fetch")
PROGRAM = """
import json, os, time
from hpcgpu import LocalGPUCluster
began = time.monotonic()
cluster = LocalGPUCluster(jobs=1, gpus_per_node=0, cores=1, memory="1GB", quiet=True{host})
start = time.monotonic() - began
client = cluster.get_client()
client.submit(sum, [1, 2]).result()
result = time.monotonic() - began
data = client.submit(os.urandom, 100_000_000)
while not data.done():
    time.sleep(0.01)
began = time.monotonic()
data.result()
print(json.dumps({{"start": start, "result": result, "fetch": time.monotonic() - began}}))
client.close()
cluster.close()
"""


def run(environment: dict[str, str], host: str = "") -> dict[str, float]:
    """Run the program; return its times."""
    text = PROGRAM.format(host=f", host={host!r}" if host else "")
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=True)
    times: dict[str, float] = json.loads(done.stdout)
    return times


def main() -> None:
    """Print the medians of all pairs."""
    from laptop import Relay
    from sshd_bed import LoginNode

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        node = stack.enter_context(LoginNode(place / "node"))
        node.configure(port=stack.enter_context(Relay([node.port], delay=0.025)).port)
        near = os.environ | node.environment()
        own = ("HPCGPU_QUEUE_DIRECTORY", "DASK_HPCGPU__CLUSTER_DIRECTORY", "DASK_TEMPORARY_DIRECTORY")
        far = near | {name: str(place / name) for name in own}
        command = [Path(sys.executable).with_name("hpcgpu"), "list", "--host", "login1"]
        subprocess.run(command, env=near, check=True, stdout=subprocess.DEVNULL)
        found = [(run(far), run(near, "login1")) for _ in range(pairs)]
    print(f"{'':<16}" + "".join(f"{name:>10}" for name in COLUMNS) + f"   median of {pairs}")
    for place_of, side in (("login node", 0), ("laptop", 1)):
        medians = [statistics.median(pair[side][name] for pair in found) for name in COLUMNS]
        print(f"{place_of:<16}" + "".join(f"{value:>10.2f}" for value in medians))
    more = [statistics.median(pair[1][name] - pair[0][name] for pair in found) for name in COLUMNS]
    print(f"{'difference':<16}" + "".join(f"{value:>10.2f}" for value in more))


if __name__ == "__main__":
    main()
