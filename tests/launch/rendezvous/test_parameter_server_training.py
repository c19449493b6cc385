"""Training with TensorFlow's servers on two hosts, one of which is lost and returns."""

import pathlib

import pytest
from node_runs import HOST, says, says_lost
from role_runs import of

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"
SCRIPT = f"""
import runpy
sys.path.insert(0, {str(EXAMPLES)!r})
import keras

def wait_at_epoch_1(self, epoch, logs=None, show=keras.callbacks.Callback.on_epoch_end):
    show(self, epoch, logs)
    if epoch == 1:
        note("epoch-1")
        wait_for("go-on")

keras.callbacks.TerminateOnNaN.on_epoch_end = wait_at_epoch_1
fit = keras.Model.fit
keras.Model.fit = lambda self, *given, callbacks, **named: fit(
    self, *given, callbacks=[*callbacks, keras.callbacks.TerminateOnNaN()], **named)
sys.argv = ["parameter_server.py", "--epochs", "6"]
runpy.run_path({str(EXAMPLES / "parameter_server.py")!r}, run_name="__main__")
"""


@pytest.mark.long
def test_host_with_a_worker_is_lost_and_returns(node, tmp_path):
    env = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    first, second = (node(rank, SCRIPT, "--parameter-servers", "1", env=env) for rank in (0, 1))
    first.wait_for("epoch-1")
    second.process.kill()
    second.process.communicate()
    again = node(1, SCRIPT, "--parameter-servers", "1", env=env)
    (tmp_path / "go-on").touch()
    ended = [first.end(), again.end()]
    assert [one.code for one in ended] == [0, 0], ended
    assert says_lost(ended[0], f"node 1 ({HOST}) was lost: {{}}; training continues without worker 1")
    assert says(ended[0], f"node 1 ({HOST}) takes part in attempt 0 again")
    shown = of(ended[0], "chief")
    assert [line.split(":")[0] for line in shown if line.startswith("epoch")] == [f"epoch {n}" for n in range(1, 7)]
    accuracy = float(shown[-1].split(": ")[1].split()[0])
    assert accuracy > 90.0, "digits; about 96 % undisturbed"
