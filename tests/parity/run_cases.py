"""Runs parity cases under the strategy that the environment asks for and writes the differences as JSON.

Started by the parity tests and by `make parity`, for several workers through `tfdist run`.
"""

import functools
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import added_loss_cases  # noqa: F401
import custom_step_cases  # noqa: F401
import data_cases  # noqa: F401
import keras
import loss_cases  # noqa: F401
import metric_cases  # noqa: F401
import model_cases  # noqa: F401
import numpy as np
import optimizer_cases  # noqa: F401
import static_size_cases  # noqa: F401
import tensorflow as tf
from absl import app, flags
from cases import CASES, Case
from comparison import largest_difference, plain

from tfdist.strategies import MirroredStrategy, MultiWorkerMirroredStrategy

_DEVICES = flags.DEFINE_integer("devices", 1, "Logical devices of this worker.")
_DEVICE_TYPE = flags.DEFINE_enum("device_type", "CPU", ["CPU", "GPU"], "What computes.")
_OUTPUT = flags.DEFINE_string("output", None, "Where to write the differences.", required=True)
_REFERENCES = flags.DEFINE_string("references", None, "Folder of the outcomes of one process, for later runs.")
_JIT_COMPILE = flags.DEFINE_bool("jit_compile", False, "Whether XLA compiles the models of the strategy.")
_CASES = flags.DEFINE_list("cases", [], "Names of the cases to run; all if empty.")

_MEGABYTES_OF_A_GPU = 3072


def main(_: list[str]) -> None:
    kind = _DEVICE_TYPE.value
    parts = [tf.config.LogicalDeviceConfiguration(_MEGABYTES_OF_A_GPU if kind == "GPU" else None)] * _DEVICES.value
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices(kind)[0], parts)
    workers = "TF_CONFIG" in os.environ
    devices = [f"{kind}:{index}" for index in range(_DEVICES.value)]
    strategy = MultiWorkerMirroredStrategy() if workers else MirroredStrategy(devices)
    one_process = tf.distribute.get_strategy()
    if _JIT_COMPILE.value:
        _compile_by_xla(type(strategy))
    warnings.simplefilter("ignore")
    results = {}
    for case in CASES.values():
        if (_CASES.value and case.name not in _CASES.value) or (case.workers_only and not workers):
            continue
        began = time.process_time()
        try:
            outcome = case.run(strategy)
            difference = largest_difference(outcome, _reference(case, one_process, keep=not workers))
            results[case.name] = {"difference": difference, "rank_difference": _rank_difference(strategy, outcome)}
        except Exception:
            # A case that fails on one worker only would leave the others waiting for it: the launcher ends them.
            if workers:
                raise
            results[case.name] = {"error": traceback.format_exc()}
        print(case.name, results[case.name], f"{time.process_time() - began:.1f} s of the processor", flush=True)
        if not workers or strategy.rank == 0:
            Path(_OUTPUT.value).write_text(json.dumps(results, indent=1))


def _compile_by_xla(strategy_class: type) -> None:
    """Compiles all models of a strategy of this class with `jit_compile=True`, the reference without."""
    compile_model = keras.Model.compile

    @functools.wraps(compile_model)
    def compile_by_xla(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.distribute_strategy, strategy_class):
            kwargs["jit_compile"] = True
        compile_model(self, *args, **kwargs)

    keras.Model.compile = compile_by_xla


def _reference(case: Case, one_process: tf.distribute.Strategy, *, keep: bool) -> dict:
    """The outcome in one process, of this run or of an earlier one. Few steps take less time than their tracing."""
    kept = Path(_REFERENCES.value, f"{case.name}.json") if _REFERENCES.value and case.reference_is_shared else None
    if kept is not None and kept.exists():
        return json.loads(kept.read_text())
    tf.config.run_functions_eagerly(not case.reference_is_traced)
    try:
        outcome = case.reference(one_process)
    finally:
        tf.config.run_functions_eagerly(False)
    if kept is not None and keep:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(plain(outcome)))
    return outcome


def _rank_difference(strategy: tf.distribute.Strategy, outcome: dict) -> float:
    """How much the workers' weights differ: they must not at all."""
    if not isinstance(strategy, MultiWorkerMirroredStrategy) or "weights" not in outcome:
        return 0.0
    flat = np.concatenate([np.ravel(weight).astype("float32") for weight in outcome["weights"]])
    gathered = strategy.gather(tf.constant(flat[np.newaxis]), axis=0).numpy()
    return float(np.abs(gathered - gathered[0]).max())


if __name__ == "__main__":
    app.run(main)
