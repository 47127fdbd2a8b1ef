"""Mean arrival delay by carrier and month, from the flights of New York in 2013.

Runs as it is on this machine, with CPU workers; on Slurm, take SlurmGPUCluster and your site's options.
"""

import dask.dataframe as dd

from hpcgpu import LocalGPUCluster
from hpcgpu.cli.demo import table

if __name__ == "__main__":
    with LocalGPUCluster(gpus_per_node=0, cores=1, jobs=2) as cluster:
        cluster.wait_for_workers()
        with cluster.get_client():
            flights = dd.from_pandas(table("flights")[["carrier", "month", "arr_delay"]], npartitions=12).persist()
            joined = flights.merge(dd.from_pandas(table("airlines"), npartitions=1), on="carrier")
            delays = joined.groupby(["name", "month"]).arr_delay.mean().compute().unstack()
            print(delays.round(1).to_string())
