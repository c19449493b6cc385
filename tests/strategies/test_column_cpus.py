"""Columns on workers with different CPUs decode gradients without XLA, which would round them differently."""

import pytest

from tfdist.strategies import ModelParallelStrategy, Pipeline, worker_start
from tfdist.strategies import model_parallel_strategy as column_cpus
from tfdist.strategies.model_parallel_strategy import compare_cpus_of_columns
from tfdist.tensorflow_internals import xla_functions

DEVICE = "/job:worker/replica:0/task:{}/device:CPU:{}"
COLUMNS = [[DEVICE.format(0, 0), DEVICE.format(1, 0)], [DEVICE.format(2, 1), DEVICE.format(3, 0)]]


@pytest.fixture
def instructions(monkeypatch):
    """The numbers of the workers' CPUs; those that were asked are appended to `asked`."""
    numbers, asked = {}, []

    def read(host):
        asked.append(host)
        return numbers.get(host, 5)

    monkeypatch.setattr(xla_functions, "_other_cpus", ())
    monkeypatch.setattr(column_cpus, "cpu_instructions_of", read)
    return numbers, asked


def test_workers_with_other_cpus_are_found(instructions):
    numbers, asked = instructions
    compare_cpus_of_columns(COLUMNS)
    assert asked == [DEVICE.format(task, 0) for task in range(4)]
    assert xla_functions._other_cpus == ()
    numbers[DEVICE.format(2, 0)] = 7
    compare_cpus_of_columns(COLUMNS)
    assert xla_functions._other_cpus == (2,)


def test_one_column_or_one_process_needs_no_comparison(instructions):
    compare_cpus_of_columns(COLUMNS[:1])
    compare_cpus_of_columns([["/job:localhost/task:0/device:CPU:0"], ["/job:localhost/task:0/device:CPU:1"]])
    assert not instructions[1]


def test_strategies_that_compress_compare(cpus, monkeypatch):
    compared = []
    monkeypatch.setattr("tfdist.strategies.model_parallel_strategy.compare_cpus_of_columns", compared.append)
    for compression in (None, "int8"):
        strategy = ModelParallelStrategy(
            cpus[:2], pipeline=Pipeline(stages=1), data_parallel=2, compression=compression
        )
    assert compared == [strategy.columns]


def test_another_task_is_asked_for_the_same_number(cpus):
    assert worker_start.cpu_instructions_of(cpus[1]) == worker_start.cpu_instructions() != 0
