"""FailureRecovery under TensorFlow's own strategies: an interrupted training ends with the same bits."""

import keras
import numpy as np
import pytest
import stock_trainings
from child_environment import run_python
from interruptions import Interrupt, Interrupted
from stock_trainings import CASES, train
from training import differences

pytestmark = pytest.mark.usefixtures("cpus")
# What each is about, other cases have, too: XLA, and the `fit` of one process.
LONG = (
    "mirrored, one device, compiled",
    "one device",
    "none, compiled",
    "one device, accumulating, compiled",
    "one worker, accumulating",
)
KILLED = "mirrored, accumulating", "one device, accumulating, compiled"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    results = {}

    def result(case):
        if case not in results:
            results[case] = train(tmp_path_factory.mktemp("undisturbed"), case, every_epochs=100)
        return results[case]

    return result


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.long] * (case in LONG)) for case in CASES])
def test_fit_resumes_within_the_epoch_after_an_exception(tmp_path, undisturbed, case):
    count = 3 if "steps_per_execution" in CASES[case][2] else 5  # the last step of the first epoch, or the one before
    with pytest.raises(Interrupted):
        train(tmp_path, case, Interrupt("on_train_batch_end", count), every_steps=2)
    first = []
    seen = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: first.append(batch))
    assert differences(undisturbed(case), train(tmp_path, case, seen, every_steps=2)) == []
    assert first[0] > 2, "it started from the beginning"


@pytest.mark.long
@pytest.mark.multi_process
def test_fit_resumes_within_the_epoch_after_a_kill(tmp_path, undisturbed):
    launcher = ["-m", "tfdist.launch", "run", "--workers", "1", "--max-restarts", "1"]
    finished = run_python(*launcher, stock_trainings.__file__, tmp_path, *KILLED, limit_seconds=280)
    assert finished.stderr.count("failed: killed by SIGKILL") == 1, finished.stderr
    for case in KILLED:
        assert differences(undisturbed(case), dict(np.load(tmp_path / f"{case}.npz"))) == []
