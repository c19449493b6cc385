"""The table of strategies and engines in `docs/engines.md`: each cell is tried, against `tfdist run`."""

import contextlib
import functools
import re
from pathlib import Path

import engine_functions as functions
import pytest
from engine_runs import assert_identical, engine_environment, ray_directory, weights_of_run
from local_spark import require_spark, spark_environment, spark_session

from tfdist.launch import on_dask, on_ray, on_spark

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engines.md"
TABLE = PAGE.read_text(encoding="utf-8").partition("## What works together")[2].partition("\n## ")[0]
HEADER, *_ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text(encoding="utf-8")
    .partition("## What works together")[2]
    .partition("\n## ")[0]
    .splitlines()
    if line.startswith("| ")
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
def local_ray(directory):
    ray = pytest.importorskip("ray", reason="needs the extra `ray`")
    with (
        ray_directory() as variables,
        engine_environment(directory, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0", **variables),
    ):
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, logging_level="warning")
        try:
            yield on_ray
        finally:
            ray.shutdown()


@contextlib.contextmanager
def local_spark(directory):
    require_spark()
    with spark_environment(directory), spark_session():
        yield on_spark


@contextlib.contextmanager
def local_dask(directory):
    distributed = pytest.importorskip("distributed", reason="needs the extra `dask`")
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0", "memory_limit": 0}
    with (
        engine_environment(directory),
        distributed.LocalCluster(**options) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield functools.partial(on_dask, client=client)


ENGINES = {"`on_ray`": local_ray, "`on_spark`": local_spark, "`on_dask`": local_dask}


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
