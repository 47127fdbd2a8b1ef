"""The backend `cudf` of dask.dataframe. Dask finds it by the entry point of its distribution."""

from __future__ import annotations

from typing import Any

import cudf
import dask
import dask.dataframe
from dask.dataframe.backends import DataFrameBackendEntrypoint


class CudfBackendEntrypoint(DataFrameBackendEntrypoint):
    @staticmethod
    def read_parquet(path: Any, **options: Any) -> Any:
        with dask.config.set({"dataframe.backend": "pandas"}):
            frame = dask.dataframe.read_parquet(path, **options)
        return frame.map_partitions(cudf.from_pandas, meta=cudf.DataFrame(frame._meta))
