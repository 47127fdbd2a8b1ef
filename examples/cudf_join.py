"""Join two tables with cuDF: each GPU has a memory pool, and a GPU that is full spills to host memory.

Usage: python examples/cudf_join.py [--cpu] [--rows ROWS] [--pool SIZE]

With --cpu the same code runs with pandas on CPU workers. This program itself needs no GPU and no cuDF: the function
`join` runs on a worker.
"""

import argparse
from importlib import import_module

from hpcgpu import LocalGPUCluster as Cluster  # at your site: SlurmGPUCluster or PBSGPUCluster


def join(frames: str, arrays: str, rows: int, parts: int = 8):
    """Join sales with their customers; runs on a worker, which sends the parts to all workers."""
    import dask.dataframe as dd
    from distributed import worker_client

    frame = import_module(frames).DataFrame
    random = import_module(arrays).random

    def sales(part):
        generator = random.default_rng(part)
        return frame(
            {"customer": generator.integers(0, 1000, size=rows // parts), "price": generator.random(rows // parts)}
        )

    def customers(part):
        generator = random.default_rng(part)
        return frame({"customer": range(part * 500, part * 500 + 500), "country": generator.integers(0, 4, size=500)})

    with worker_client():
        joined = dd.from_map(sales, range(parts)).merge(
            dd.from_map(customers, range(2)), on="customer", broadcast=False, shuffle_method="tasks"
        )
        table = joined.groupby("country").price.agg(["count", "mean"]).compute().sort_index()
    return table.to_pandas() if frames == "cudf" else table


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--pool", default="0.5", help="part of each GPU's memory, or an amount such as 8GB")
    given = parser.parse_args()
    gpu = {"gpus_per_node": 1, "rmm_pool_size": given.pool, "enable_cudf_spill": True}
    with Cluster(jobs=2, **({"gpus_per_node": 0, "cores": 1} if given.cpu else gpu)) as cluster:
        cluster.wait_for_workers()
        libraries = ("pandas", "numpy") if given.cpu else ("cudf", "cupy")
        print(cluster.get_client().submit(join, *libraries, given.rows).result())
