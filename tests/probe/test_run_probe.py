"""A program is measured up to its first `fit`, without its callbacks and without a file that changes."""

import itertools
import json
import os
import selectors

import pytest

from tfdist.planning.measurements import DENSE, EXCHANGE, GATHER, SUM, Measurements
from tfdist.probe import run_probe
from tfdist.probe.run_probe import ProbeError, measure

PROGRAM = """
    import atexit, pathlib, sys
    import keras, numpy as np
    from tfdist.callbacks import FailureRecovery
    from tfdist.strategies import ParameterServerStrategy

    here = pathlib.Path(__file__).parent
    atexit.register(lambda: (here / "at_exit").write_text("written"))

    class Writes(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            (here / "callback").write_text("written")

    strategy = ParameterServerStrategy()
    with strategy.scope():
        layers = [keras.layers.Embedding(50, 8), keras.layers.Flatten(), keras.layers.Dense(300), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
        model.compile("adam", "mse", metrics=["mae"])
    if strategy.num_replicas_in_sync != 1:
        sys.exit("a program of one worker")
    callbacks = [
        Writes(),
        FailureRecovery(here / "recovery"),
        keras.callbacks.ModelCheckpoint(here / "checkpoint" / "model.keras"),
        keras.callbacks.CSVLogger(here / "log.csv"),
    ]
    x = np.arange(160).reshape(40, 4) % 50
    model.fit(x, np.ones([40, 1]), batch_size=16, callbacks=callbacks, validation_data=object(), epochs=3)
    (here / "after_fit").write_text("written")
"""


def listing(folder):
    return {file: file.stat().st_mtime_ns for file in folder.rglob("*")}


def test_a_program_is_measured_and_leaves_nothing(measured, tmp_path):
    for name in ("recovery", "checkpoint"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").write_text("kept")
    (tmp_path / "train.py").write_text("")
    before = listing(tmp_path)

    found = measured(PROGRAM, methods=["int8"])

    program = found.program
    after = listing(tmp_path)
    assert before.keys() == after.keys()
    assert {file for file in before if before[file] != after[file]} == {tmp_path / "train.py"}
    assert (program.rows, program.samples, program.optimizer) == (16, 40, "Adam")
    assert [(step.rows, step.compiled) for step in program.steps] == [(8, False), (16, False)]
    for step in program.steps:
        assert 0 < step.forward_seconds and 0 < step.backward_seconds and 0 < step.update_seconds < step.seconds
        assert step.peak_bytes > program.process_bytes > 2**27
    # 50 * 8 embeddings, 32 * 300 and 300 weights, 301 of the last layer
    assert program.gradient_bytes == 4 * (400 + 9600 + 300 + 301)
    assert program.slot_bytes >= 2 * program.gradient_bytes
    assert [layer.parameters for layer in program.layers] == [400, 0, 9900, 301]
    assert program.layers[2].activation_bytes == 1200
    assert program.is_functional and program.exchanges_per_step == 1 and program.other_collectives
    dense, encoded = program.exchanges
    assert (dense.method, dense.gradient_error, dense.state_bytes) == (DENSE, 0, 0)
    # dense gradients are one sum; of the embedding the 32 rows of a worker are gathered, with their number and indices
    assert [(call.kind, call.bucket) for call in dense.collectives] == [(SUM, 0), *[(GATHER, 1)] * 3]
    assert dense.collectives[0].nbytes == 4 * (9600 + 300 + 301)
    assert 0 < encoded.gradient_error < 0.02
    assert encoded.collectives[0].nbytes < dense.collectives[0].nbytes / 3
    assert encoded.state_bytes >= 4 * 9600
    assert len(program.bucket_ready) == 2 and max(program.bucket_ready) <= 1 and min(program.bucket_ready) > 0

    machine = found.machine
    assert machine.cores >= machine.cores_per_worker >= 1 and machine.memory_bytes > 2**28
    for transfers, kind in itertools.product((machine.transfers, machine.local_transfers), (SUM, GATHER, EXCHANGE)):
        sizes = [transfer.nbytes for transfer in transfers if transfer.kind == kind]
        assert len(sizes) >= 3 and sizes == sorted(sizes)
        assert all(0 < transfer.core_seconds and 0 < transfer.seconds for transfer in transfers)
    assert Measurements.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_programs_that_cannot_be_measured_say_why(measured, tmp_path, capfd):
    with pytest.raises(ProbeError, match="never calls `fit`"):
        measured("import sys; sys.exit(0)")
    with pytest.raises(ProbeError, match="KeyError: 'data'"):
        measured("print('loads'); {}['data']")
    assert "Traceback" in capfd.readouterr().err
    with pytest.raises(ProbeError, match="Data cardinality is ambiguous"):
        measured(
            """
            import keras, numpy as np
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            try:
                model.fit(np.ones([8, 3]), np.ones([7, 1]))
            except ValueError:
                pass
            """
        )
    with pytest.raises(ProbeError, match="not a file"):
        measure([str(tmp_path / "missing.py")], workers=[2], methods=[], with_xla=False, timeout_seconds=9)


def test_a_slow_program_is_ended(measured, tmp_path, monkeypatch):
    source = """
        import os, pathlib, time
        part = pathlib.Path(__file__).with_name("part")
        part.write_text(str(os.getpid()))
        part.rename(part.with_name("pid"))
        time.sleep(999)
    """
    limits = []

    class Selector(selectors.DefaultSelector):
        """Its time is over once the program sleeps, however long that takes."""

        def select(self, timeout):
            limits.append(timeout)
            sent = []
            while not sent and not (tmp_path / "pid").exists():
                sent = super().select(0.02)
            return sent or super().select(0.0)

    monkeypatch.setattr(run_probe.selectors, "DefaultSelector", Selector)
    with pytest.raises(ProbeError, match="longer than its limit.*100 s.*up to its first `fit`"):
        measured(source, timeout_seconds=100)
    assert limits and all(0 < limit <= 100 for limit in limits)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
