"""CommunicationReport: numbers, logs, table, errors."""

import csv
import importlib.util
import re
import sys
import warnings
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from dense_model import INPUTS, TARGETS, compiled
from fake_strategy import FakeServers, FakeStrategy
from report_runs import BYTES, SECONDS, fit, silent, watch
from stock_strategy import stock_mirrored

from tfdist.callbacks import CommunicationReport, GradientAccumulation
from tfdist.collectives import CommunicationStats
from tfdist.compression import Policy
from tfdist.strategies import MirroredStrategy

# Computed by hand, for 2 and 3 replicas. Dense: 2 (N - 1) / N times 12288 and 192 bytes.
# int8: 12 blocks of 260 bytes and the bias. 2 replicas send all of them to each other. Each of 3 replicas sends 2 of
# its 3 parts (4 blocks, 64 bytes of bias, and 4 bytes with the receiver), then the sum of its part twice.
# powersgd:2: 64 x 2 and 48 x 2 values of 4 bytes in two sums; the bias is in the first sum.
DENSE = {2: 12288 + 192, 3: 16384 + 256}
WIRE = {
    (2, "int8"): 12 * 260 + 192,
    (3, "int8"): 2 * (4 * 260 + 64 + 4) + 2 * (4 * 260 + 64),
    (2, "powersgd:2"): (512 + 192) + 384,
    (3, "powersgd:2"): round((512 + 192) * 4 / 3) + 384 * 4 // 3,
}


@pytest.mark.parametrize(
    ("replicas", "compression"),
    [case if case == (3, "powersgd:2") else pytest.param(*case, marks=pytest.mark.long) for case in WIRE],
    ids=str,
)
def test_numbers_equal_those_computed_by_hand(cpus, replicas, compression):
    model = compiled(MirroredStrategy(cpus[:replicas], compression=compression))
    logs = fit(model, silent(), epochs=2)
    dense, wire = DENSE[replicas], WIRE[replicas, compression]
    assert logs["dense_bytes"] == [dense] * 2
    assert logs["wire_bytes"] == [wire] * 2
    assert logs["compression_ratio"] == [dense / wire] * 2
    assert all(type(logs[name][0]) is float for name in BYTES)
    assert not set(SECONDS) & set(logs)


def test_numbers_are_of_an_update_not_of_a_step(cpus):
    strategy = MirroredStrategy(cpus[:2], compression="int8")
    model = compiled(strategy, steps_per_execution=4)
    logs = fit(model, GradientAccumulation(3), silent(), batch_size=4, epochs=2)  # 12 steps, 4 updates
    assert logs["wire_bytes"] == [12 * 260 + 192] * 2
    assert strategy.communication.updates == 8


def test_without_an_update_the_last_numbers_are_repeated(cpus):
    seen = []
    model = compiled(MirroredStrategy(cpus[:2], compression={"kernel": "bf16"}))
    see = watch(seen, lambda logs: [logs[name] for name in BYTES])
    fit(model, GradientAccumulation(2), silent(every_steps=1), see)
    nothing, numbers = [0.0, 0.0, 1.0], [12480.0, 6144.0 + 192.0, 12480 / 6336]
    assert seen == [nothing, numbers, numbers, numbers]


def test_steps_report_their_own_numbers_and_epochs_the_average(cpus, capsys):
    seen = []
    model = compiled(MirroredStrategy(cpus[:2], compression=Policy("bf16", dense_steps=2)))
    logs = fit(model, silent(every_steps=1), watch(seen, lambda logs: logs["wire_bytes"]), verbose=1)
    assert seen == [12480.0, 12480.0, 6336.0, 6336.0]
    assert logs["wire_bytes"] == [(12480 + 6336) / 2]
    lines = [line for line in capsys.readouterr().out.replace("\r", "\n").splitlines() if "loss" in line]
    shown = [float(re.search(r" - wire_bytes: ([0-9.]+)", line)[1]) for line in lines]  # the moving progress bar
    assert len(shown) > 1 and (shown[0], shown[-1]) == (12480.0, 9408.0)


class Reduction:
    """Counts one update of `bytes_of_update` per step."""

    def __init__(self):
        self.stats, self.counters = CommunicationStats(), self

    def step(self, bytes_of_update):
        self.stats += CommunicationStats(wire_bytes=bytes_of_update, dense_bytes=bytes_of_update, updates=1)

    def by_label(self):
        return {"bf16": self.stats}

    def durations_by_method(self):
        return {}


def by_hand(report):
    """The report, and a function that makes an execution of steps and returns its logs."""
    reduction = Reduction()
    strategy = FakeStrategy(gradient_reduction=reduction, num_replicas_in_sync=2)
    report.set_model(SimpleNamespace(distribute_strategy=strategy))

    def execute(first, *bytes_of_updates):
        report.on_train_batch_begin(first)
        for number in bytes_of_updates:
            reduction.step(number)
        strategy.communication = reduction.stats
        logs = {}
        report.on_train_batch_end(first + len(bytes_of_updates) - 1, logs)
        return logs.get("wire_bytes")

    return execute


def test_reports_come_every_so_many_steps_also_after_a_restart():
    report = silent(every_steps=3)
    execute = by_hand(report)
    report.on_train_begin()
    assert [execute(step, size) for step, size in enumerate([1, 2, 3, 10])] == [None, None, 2.0, None]
    assert execute(4, 20, 30, 40, 50) == 30.0  # steps 5 to 8, in one execution
    report.on_epoch_end(0, {})
    assert execute(0, 2) == 2.0, "steps are counted over epochs"
    assert execute(1, 4) is None
    restarted = silent(every_steps=3)
    execute = by_hand(restarted)
    restarted.on_train_begin()
    restarted.set_state(report.get_state())
    assert [execute(2, 6), execute(3, 8), execute(4, 1)] == [None, 6.0, None]
    restarted.on_train_begin()
    assert [execute(step, 5) for step in range(3)] == [None, None, 5.0], "each `fit` starts at 0"


def test_all_four_writers_of_logs_show_the_numbers(cpus, tmp_path, capsys, monkeypatch):
    if importlib.util.find_spec("tensorboard") is None:
        for name in ("tensorboard", "tensorboard.summary", "tensorboard.summary.v2"):
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(scalar=write_scalar))
    model = compiled(MirroredStrategy(cpus[:2], compression="int8"))
    csv_logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    board = keras.callbacks.TensorBoard(tmp_path / "board", write_graph=False)
    history = fit(model, silent(timing=True), csv_logger, board, epochs=2, verbose=2, validation_data=(INPUTS, TARGETS))
    names = (*BYTES, *SECONDS)
    assert all(len(history[name]) == 2 for name in names)
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert {name: [float(row[name]) for row in rows] for name in names} == {name: history[name] for name in names}
    board_values = scalars(tmp_path / "board" / "train")
    for name in names:
        np.testing.assert_allclose(board_values[f"epoch_{name}"], history[name], rtol=1e-6)  # float32
    printed = capsys.readouterr().out
    assert printed.count(" - dense_bytes: 12480.0000") == printed.count(" - wire_bytes: 3312.0000") == 2
    assert printed.count(" - exchange_seconds: ") == 2


def write_scalar(name, data, step, description):
    """What TensorFlow takes from TensorBoard's package; its own writers write the file."""
    tf.summary.write(name, tf.constant(data, tf.float32), step)


def scalars(folder):
    found = {}
    for file in sorted(folder.glob("events*")):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                found.setdefault(value.tag, []).append(tf.make_ndarray(value.tensor).tolist())
    return found


def test_a_writer_that_comes_first_is_warned_of(cpus, tmp_path):
    model = compiled(MirroredStrategy(cpus[:2]))
    first, last = (keras.callbacks.CSVLogger(tmp_path / name) for name in ("first.csv", "last.csv"))
    with pytest.warns(UserWarning, match=r"Received: CSVLogger, History before it\. Expected: .*Move it to the front"):
        fit(model, first, keras.callbacks.History(), silent(), last)
    assert "wire_bytes" in (tmp_path / "last.csv").read_text()
    assert "wire_bytes" not in (tmp_path / "first.csv").read_text()


def test_by_epoch_nothing_is_said_of_batches_nor_warned_of(cpus, tmp_path):
    seen = []
    model = compiled(MirroredStrategy(cpus[:2]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        csv_logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
        fit(model, keras.callbacks.TerminateOnNaN(), silent(), csv_logger, watch(seen, set))
    assert seen == [{"loss"}] * 4
    assert not [warning for warning in caught if "CommunicationReport" in str(warning.message)]


def test_the_table_has_a_row_for_each_method(cpus, capsys):
    model = compiled(MirroredStrategy(cpus[:2], compression={"kernel": "powersgd:2", "bias": None}))
    fit(model, CommunicationReport(), epochs=2)
    assert capsys.readouterr().out.splitlines() == [
        "Gradients sent per update by this worker's first replica (8 updates, 2 replicas):",
        "method                    variables  values  dense kB  wire kB  ratio",
        "---------------------------------------------------------------------",
        "uncompressed                      1      48     0.192    0.192   1.00",
        "PowerSGD(rank=2, seed=0)          1   3,072    12.288    0.896  13.71",
        "---------------------------------------------------------------------",
        "total                             2   3,120    12.480    1.088  11.47",
    ]


def test_table_is_of_its_own_training_and_printed_by_the_chief_alone(cpus, capsys, monkeypatch):
    strategy = MirroredStrategy(cpus[:2])
    fit(compiled(strategy))
    other = compiled(strategy)
    report = silent()
    fit(other, report)
    of_first = report.table()
    monkeypatch.setattr(type(strategy), "rank", 1)
    fit(other, CommunicationReport())
    assert report.table() == of_first
    assert "(4 updates, 2 replicas)" in of_first
    assert of_first.splitlines()[3].split() == ["uncompressed", "2", "3,120", "12.480", "12.480", "1.00"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "make", [tf.distribute.get_strategy, lambda: MirroredStrategy(["CPU:0"])], ids=["none", "ours"]
)
def test_one_replica_sends_nothing_and_says_so(cpus, capsys, make):
    logs = fit(compiled(make()), CommunicationReport(timing=True))
    assert [logs[name] for name in (*BYTES, *SECONDS)] == [[0.0], [0.0], [1.0], [0.0], [0.0], [0.0]]
    assert capsys.readouterr().out == "There is one replica: no gradients are exchanged.\n"


def test_eager_steps_count_too(cpus):
    strategy = MirroredStrategy(cpus[:2], compression="int8")
    logs = fit(compiled(strategy, run_eagerly=True), silent(timing=True))
    assert logs["wire_bytes"] == [3312.0]
    assert min(logs[name][0] for name in SECONDS) > 0


def test_keras_may_call_back_asynchronously_unless_steps_are_reported():
    assert CommunicationReport().async_safe and not CommunicationReport(every_steps=1).async_safe


@pytest.mark.parametrize("every_steps", ["epoch", 0, -1, 2.5, 2.0, True, float("nan"), float("inf")], ids=str)
def test_interval_is_checked(every_steps):
    with pytest.raises(ValueError, match=r"Invalid `every_steps`. Received: every_steps=.*Expected: a whole number"):
        CommunicationReport(every_steps=every_steps)


def test_stock_strategy_is_rejected_with_the_remedy(cpus):
    model = compiled(stock_mirrored(cpus[:2]))
    with pytest.raises(ValueError, match=r"does not count .*tf.distribute's MirroredStrategy.*tfdist.strategies"):
        fit(model, CommunicationReport())


def test_parameter_servers_need_a_worker_report():
    report = CommunicationReport()
    report.set_model(SimpleNamespace(distribute_strategy=FakeServers()))
    with pytest.raises(ValueError, match=r"worker pushes its gradients.*Expected: `tfdist.callbacks.WorkerReport`"):
        report.on_train_begin()
