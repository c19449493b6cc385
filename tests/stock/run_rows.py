"""Runs programs of the table under one library's strategies and writes what happened as JSON.

Every program runs first under the strategies and then in one process. A program that stops is noticed by this process
itself, which writes so and ends; one that aborts it leaves nothing behind: the starter sees how it ended.
"""

import json
import os
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "parity")]

import numpy as np  # noqa: E402
import programs  # noqa: E402
import tensorflow as tf  # noqa: E402
from absl import app, flags  # noqa: E402
from comparison import TOLERANCE, largest_difference  # noqa: E402

_LIBRARY = flags.DEFINE_enum("library", None, ["stock", "tfdist"], "Whose strategies.", required=True)
_PROGRAMS = flags.DEFINE_list("programs", None, "Names of the programs.", required=True)
_LIMIT = flags.DEFINE_float("limit", 60.0, "Seconds without progress after which a program is given up.")
_OUTPUT = flags.DEFINE_string("output", None, "Where to write what happened.", required=True)


def main(_: list[str]) -> None:
    warnings.simplefilter("ignore")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * len(programs.DEVICES))
    if _LIBRARY.value == "stock":
        strategies: Any = tf.distribute
    else:
        import tfdist.strategies as strategies
    is_writer = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0) == 0
    results: dict[str, Any] = {}

    def write(name: str, result: dict[str, Any]) -> None:
        results[name] = result
        if is_writer:
            temporary = Path(f"{_OUTPUT.value}.{os.getpid()}")
            temporary.write_text(json.dumps(results))
            temporary.rename(_OUTPUT.value)

    def watch() -> None:
        while time.monotonic() < programs.last_progress + _LIMIT.value:
            time.sleep(0.1)
        write(running[0], {"waits": _LIMIT.value})
        os._exit(1)

    running = [_PROGRAMS.value[0]]
    programs.progress()
    if is_writer:  # the others are ended with it
        threading.Thread(target=watch, daemon=True).start()
    for running[0] in _PROGRAMS.value:
        programs.progress()
        write(running[0], _result(getattr(programs, running[0]), strategies))
    sys.stdout.flush()
    os._exit(0)  # a cluster whose workers have failed takes its time to end


def _result(program: Any, strategies: Any) -> dict[str, Any]:
    try:
        ours = program(strategies)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    reference = program(programs.OneProcess)
    shown, _ = ours.pop("shown", ""), reference.pop("shown", "")
    result = {"difference": largest_difference(ours, reference), "shown": shown}
    if "weights" in ours and np.isnan(np.concatenate([np.ravel(weight) for weight in ours["weights"]])).any():
        result["shown"] = "weights turn NaN"
    if "evaluations" in ours:
        pairs = list(zip(ours["evaluations"], reference["evaluations"], strict=True))
        wrong = sum(largest_difference(*pair) > TOLERANCE for pair in pairs)
        result["wrong"], result["of"] = wrong, len(pairs)
    return result


if __name__ == "__main__":
    app.run(main)
