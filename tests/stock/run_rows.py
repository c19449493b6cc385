"""Runs programs of the table under one library's strategies and writes what happened as JSON.

Every program runs first under the strategies and then in one process. The result of the one that runs is empty, and the
file is touched whenever it makes progress, so that the starter sees where a process has stopped or died.
"""

import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "parity")]

import numpy as np  # noqa: E402
import programs  # noqa: E402
import tensorflow as tf  # noqa: E402
from absl import app, flags  # noqa: E402
from comparison import largest_difference  # noqa: E402

_LIBRARY = flags.DEFINE_enum("library", None, ["stock", "tfdist"], "Whose strategies.", required=True)
_PROGRAMS = flags.DEFINE_list("programs", None, "Names of the programs.", required=True)
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

    if is_writer:
        programs.on_progress.append(lambda: os.utime(_OUTPUT.value))
    for name in _PROGRAMS.value:
        write(name, {})
        write(name, _result(getattr(programs, name), strategies))
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
    return result


if __name__ == "__main__":
    app.run(main)
