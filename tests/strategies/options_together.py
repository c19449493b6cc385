"""The table of docs/choosing_a_strategy.md that says what works together, and a program for each of its cells."""

import contextlib
import re
import unittest.mock
from pathlib import Path

import keras
import numpy as np

from tfdist.callbacks import FailureRecovery
from tfdist.compression import Policy
from tfdist.sharded_state import weight_gathers
from tfdist.strategies import DiLoCo, LocalSGD, MultiWorkerMirroredStrategy

_PAGE = Path(__file__).parents[2] / "docs" / "choosing_a_strategy.md"
_random = np.random.default_rng(0)
INPUTS = _random.normal(size=(72, 12)).astype("float32")
TARGETS = np.tanh(INPUTS @ _random.normal(size=(12, 2)).astype("float32"))


def _sgd(**options):
    return lambda: keras.optimizers.SGD(0.05, momentum=0.5, **options)


# What a column or row adds: options of the strategy, the optimizer, options of `compile`.
OPTIONS = {
    '`compression="int8"`': {"strategy": lambda: {"compression": Policy("int8", dense_below=0)}},
    "`shard_optimizer_state=True`": {"strategy": lambda: {"shard_optimizer_state": True}},
    "`shard_weights=True`": {"strategy": lambda: {"shard_weights": True}},
    "`load_balancing=True`": {"strategy": lambda: {"load_balancing": True}},
    "`shares=[1, 3]`": {"strategy": lambda: {"shares": [1, 3]}},
    "`LocalSGD`": {"strategy": lambda: {"mode": LocalSGD(sync_every=2)}},
    "`DiLoCo`": {"strategy": lambda: {"mode": DiLoCo(sync_every=4, fragments=2, overlap_steps=1)}},
    "`micro_batches=2`": {"strategy": lambda: {"micro_batches": 2}},
    "`gradient_accumulation_steps`": {"optimizer": _sgd(gradient_accumulation_steps=2)},
    "`clipnorm`": {"optimizer": _sgd(clipnorm=0.3)},
    "`global_clipnorm`": {"optimizer": _sgd(global_clipnorm=0.3)},
    "`use_ema`": {"optimizer": _sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)},
    "`LossScaleOptimizer`": {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(_sgd()(), initial_scale=8.0)},
    "`Lamb`": {"optimizer": lambda: keras.optimizers.Lamb(0.02)},
    "`jit_compile`": {"compile": {"jit_compile": True}},
    "`steps_per_execution`": {"compile": {"steps_per_execution": 2}},
    "`run_eagerly`": {"compile": {"run_eagerly": True}},
    "`FailureRecovery`": {"recovers": True},
}
_ROUNDS = {'`compression="int8"`'}
_LOCAL = {"`LocalSGD`", "`DiLoCo`"}


def table():
    """Returns the cells by row and column, without those of a row and the same column."""
    section = _PAGE.read_text().split("## What works together")[1].split("\n## ")[0]
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", section, re.M)
    ]
    cells = {(row[0], column): cell for row in rows for column, cell in zip(header[1:], row[1:], strict=True)}
    return {key: cell for key, cell in cells.items() if cell}


def equals_one_process(names):
    """Whether the numbers with these options are those of one process."""
    return not {*names} & (_ROUNDS | _LOCAL)


def trained(names, directory=None, *, alone=False):
    """Trains with the options of a cell.

    Args:
        names: The row and the column.
        directory: Where FailureRecovery saves, for two trainings of which the second one continues the first.
        alone: Whether to train in one process, without the options of strategies.

    Returns:
        The weights by names, and the loss of each epoch.
    """
    added = [OPTIONS[name] for name in names]
    keras.utils.set_random_seed(0)
    scope = contextlib.nullcontext()
    if not alone:
        arguments = {key: value for one in added for key, value in one.get("strategy", dict)().items()}
        scope = MultiWorkerMirroredStrategy(**arguments).scope()
    # So that the weights of a small model are split.
    with scope, unittest.mock.patch.object(weight_gathers, "SMALLEST_SPLIT", 16):
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(2)])
        optimizer = next((one["optimizer"] for one in added if "optimizer" in one), _sgd())
        model.compile(
            optimizer(), "mse", **{key: value for one in added for key, value in one.get("compile", {}).items()}
        )
    recovers = any(one.get("recovers") for one in added) and directory is not None
    losses = []
    for epochs in (2, 4) if recovers else (4,):
        callbacks = [FailureRecovery(directory)] if recovers else []
        # 9 batches of 8 rows, of which workers have 4 and 4, or 2 and 6.
        history = model.fit(INPUTS, TARGETS, 8, epochs, shuffle=False, verbose=0, callbacks=callbacks).history
        losses += history["loss"]
    return {f"weight {number}": value for number, value in enumerate(model.get_weights())}, losses
