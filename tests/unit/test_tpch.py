"""The queries of benchmarks/tpch.py have the answers that DuckDB has for the SQL of the specification."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import dask
import pandas as pd
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def reference() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield __import__("tpch_reference")


@pytest.fixture(scope="module")
def tables(reference: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> object:
    return reference.make(tmp_path_factory.mktemp("tpch"), scale=0.01, parts=2)


@pytest.mark.parametrize("number", range(1, 23))
def test_a_query_has_the_answer_of_duckdb(number: int, reference: ModuleType, tables: object) -> None:
    with dask.config.set(scheduler="threads"):
        answer = reference.QUERIES[number](tables)
    expected = reference.reference(tables, number)
    assert expected and len(expected) == len(answer)
    assert reference.difference(answer, expected) == ""


def test_an_answer_that_differs_is_reported(reference: ModuleType) -> None:
    answer = pd.DataFrame({"name": ["FRANCE", "CHINA"], "revenue": [10.0, 20.0]})
    assert reference.difference(answer, [("FRANCE", 10.0), ("CHINA", 20.0 + 1e-9)]) == ""
    assert reference.difference(answer, [("FRANCE", 10.0)]) == "2 rows instead of 1"
    assert reference.difference(answer, [("FRANCE",), ("CHINA",)]) == "2 columns instead of 1"
    assert reference.difference(answer, [("FRANCE", 10.0), ("CHINA", 20.01)]).startswith("row 1, revenue: 20.0 instead")
    assert reference.difference(answer, [("FRANCE", None), ("CHINA", 20.0)]).startswith("row 0, revenue: 10.0 instead")
