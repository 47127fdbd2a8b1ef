"""Train one XGBoost model on all GPUs of a cluster.

Usage: python examples/xgboost_train.py [--cpu] [--rows ROWS] [--jobs JOBS]

With --cpu the same code trains on CPU workers. This program itself needs no GPU and no CuPy, only XGBoost for the
model that it gets: the function `train` runs on a worker.
"""

import argparse

from hpcgpu import LocalGPUCluster as Cluster  # at your site: SlurmGPUCluster or PBSGPUCluster


def train(device: str, arrays: str, rows: int):
    """Return the model and its errors by round; runs on a worker, and the training itself on all workers."""
    import dask
    import dask.array as da
    import xgboost.dask
    from distributed import worker_client

    with worker_client() as client, dask.config.set({"array.backend": arrays}):
        features = da.random.random((rows, 10), chunks=(rows // 8, 10)).persist()
        target = 3 * features[:, 0] - 2 * features[:, 1] + features[:, 2] * features[:, 3]
        data = xgboost.dask.DaskQuantileDMatrix(client, features, target)
        settings = {"objective": "reg:squarederror", "device": device}
        found = xgboost.dask.train(client, settings, data, num_boost_round=30, evals=[(data, "train")])
    return found["booster"], found["history"]["train"]["rmse"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    with Cluster(
        jobs=given.jobs, **({"gpus_per_node": 0, "cores": 1} if given.cpu else {"gpus_per_node": 1})
    ) as cluster:
        cluster.wait_for_workers()
        where = ("cpu", "numpy") if given.cpu else ("cuda", "cupy")
        model, errors = cluster.get_client().submit(train, *where, given.rows).result()
        print(f"{model.num_boosted_rounds()} rounds; the error fell from {errors[0]:.3f} to {errors[-1]:.3f}")
