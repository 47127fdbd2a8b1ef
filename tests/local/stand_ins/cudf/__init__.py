"""What stands in for cuDF: tables of pandas with a type of their own, and a note of each process that makes one."""

from __future__ import annotations

import meeting
import pandas


def get_option(name: str) -> bool:
    """dask-cuda asks whether tables spill."""
    return {"spill": False}[name]


class Series(pandas.Series):
    @property
    def _constructor(self) -> type[Series]:
        return Series

    @property
    def _constructor_expanddim(self) -> type[DataFrame]:
        return DataFrame

    def to_pandas(self) -> pandas.Series:
        return pandas.Series(self)


class DataFrame(pandas.DataFrame):
    @property
    def _constructor(self) -> type[DataFrame]:
        return DataFrame

    @property
    def _constructor_sliced(self) -> type[Series]:
        return Series

    def to_pandas(self) -> pandas.DataFrame:
        return pandas.DataFrame(self)


def from_pandas(frame: pandas.DataFrame) -> DataFrame:
    if len(frame):  # not what shows the types of a table
        meeting.took_part.append(("cudf", -1, -1, meeting.gpu()))
    return DataFrame(frame)
