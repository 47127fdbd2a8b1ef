"""Principal components of a tall matrix with CuPy: the matrix is spread over all GPUs.

Usage: python examples/cupy_array.py [--cpu] [--rows ROWS]

With --cpu the same code runs with NumPy on CPU workers. This program itself needs no GPU and no CuPy: the function
`components` runs on a worker.
"""

import argparse
from importlib import import_module

from hpcgpu import LocalGPUCluster as Cluster  # at your site: SlurmGPUCluster or PBSGPUCluster


def components(arrays: str, rows: int, columns: int = 50):
    """Return the share of the variance in each component; runs on a worker, which sends the parts to all workers."""
    import dask
    import dask.array as da
    from distributed import worker_client

    with worker_client(), dask.config.set({"array.backend": arrays}):
        matrix = da.random.random((rows, columns), chunks=(rows // 8, columns)).persist()
        centred = matrix - matrix.mean(axis=0)
        covariance = (centred.T @ centred / (rows - 1)).compute()
    eigenvalues = import_module(arrays).linalg.eigvalsh(covariance)[::-1]
    return eigenvalues / eigenvalues.sum()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rows", type=int, default=1_000_000)
    given = parser.parse_args()
    with Cluster(jobs=2, **({"gpus_per_node": 0, "cores": 1} if given.cpu else {"gpus_per_node": 1})) as cluster:
        cluster.wait_for_workers()
        shares = cluster.get_client().submit(components, "numpy" if given.cpu else "cupy", given.rows).result()
        print("the first component has", f"{float(shares[0]):.1%}", "of the variance of", len(shares))
