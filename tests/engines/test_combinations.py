"""The table of strategies and engines in `docs/engines.md`: each cell is tried, against `tfdist run`."""

import contextlib
import functools
import re
from pathlib import Path

import engine_functions as functions
import pytest
from engine_runs import assert_identical, engine_environment, weights_of_run
from local_dask import cluster_of
from local_ray import local_ray
from local_spark import require_spark, spark_environment, spark_session

from tfdist.launch import on_dask, on_ray, on_spark

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engines.md"
TABLE = PAGE.read_text(encoding="utf-8").partition("## What works together")[2].partition("\n## ")[0]
HEADER, *_ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines() if line.startswith("| ")
]
ROWS = {row[0]: dict(zip(HEADER[1:], row[1:], strict=True)) for row in _ROWS}
CASES = {
    "`MultiWorkerMirroredStrategy`": (functions.train, {}),
    '`MultiWorkerMirroredStrategy(compression="int8")`': (
        functools.partial(functions.train, compression="int8"),
        {},
    ),
    "`ModelParallelStrategy`, `chief=True`": (functions.train_in_stages, {"chief": True}),
    "`ParameterServerStrategy`, `parameter_servers=1`": (functions.train_with_servers, {"parameter_servers": 1}),
    "`chief=True` with `parameter_servers=1`": (functions.train_in_stages, {"chief": True, "parameter_servers": 1}),
}

REFERENCES = {}


@contextlib.contextmanager
def on_local_ray(directory):
    with local_ray(directory):
        yield on_ray


@contextlib.contextmanager
def on_local_spark(directory):
    require_spark()
    with spark_environment(directory), spark_session():
        yield on_spark


@contextlib.contextmanager
def on_local_dask(directory):
    with engine_environment(directory), cluster_of(2) as client:
        yield functools.partial(on_dask, client=client)


ENGINES = {"`on_ray`": on_local_ray, "`on_spark`": on_local_spark, "`on_dask`": on_local_dask}


def test_the_table_has_all_engines_and_cases():
    assert HEADER[1:] == list(ENGINES) and list(ROWS) == list(CASES)
    assert {cell for row in ROWS.values() for cell in row.values()} == {"works", "refused"}


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_each_cell(engine, tmp_path_factory):
    with ENGINES[engine](tmp_path_factory.mktemp("temporary")) as call:
        for name, (function, options) in CASES.items():
            arguments = (str(tmp_path_factory.mktemp("checkpoints")),) if not options else ()
            if ROWS[name][engine] == "refused":
                with pytest.raises(ValueError, match=re.escape("Parameter servers have a chief already.")):
                    call(function, *arguments, workers=2, **options)
                continue
            values = call(function, *arguments, workers=2, **options)
            found = values[0] if options else values[0][0]
            assert_identical(found, reference(tmp_path_factory, name))


def reference(tmp_path_factory, name):
    if name not in REFERENCES:
        _, options = CASES[name]
        more = [f"--{option.replace('_', '-')}" for option in options]
        more += [str(value) for value in options.values() if value is not True]
        kind = "chief-0.npz" if options else "worker-0.npz"
        arguments = ["int8"] if "int8" in name else []
        REFERENCES[name] = weights_of_run(tmp_path_factory.mktemp("reference"), kind, *more, arguments=arguments)
    return REFERENCES[name]
