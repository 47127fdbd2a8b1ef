"""A multi-node GPU cluster on Slurm: an array that is too large for one GPU, transposed among all of them.

Usage: python examples/slurm.py QUEUE [GPUS_PER_NODE]
"""

import sys

import dask.array as da

from hpcgpu import SlurmGPUCluster

if __name__ == "__main__":
    queue = sys.argv[1]
    gpus = int(sys.argv[2]) if len(sys.argv) > 2 else 4
    with SlurmGPUCluster(queue=queue, gpus_per_node=gpus, cores=gpus, walltime="00:30:00", jobs=2) as cluster:
        print(cluster.job_script())
        cluster.wait_for_workers()
        print(cluster.jobs)
        with cluster.get_client():
            array = da.random.random((4000, 4000), chunks=(500, 4000)).persist()
            columns = array.rechunk((4000, 500))
            print("symmetric part has mean", round(float(((columns + columns.T) / 2).mean()), 2))
