"""WeightComparison: compares the weights of all replicas, and gradients; names those that differ from the majority."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import keras
import numpy as np

from tfdist.callbacks.gradient_comparison import GradientComparison, check_fraction
from tfdist.callbacks.replica_votes import (
    RESTART,
    TEST_MEMORY,
    DifferentReplicasError,
    Verdict,
    exclude_workers,
    name_of,
    values_of_replicas,
    vote,
)
from tfdist.callbacks.strategy_support import check_equal_replicas, check_strategies_early
from tfdist.callbacks.weight_hashes import Hashes, common_variables, hash_all, hash_variables
from tfdist.keras_internals.epoch_iterator import last_step
from tfdist.recovery.training_state import TrainingProgress
from tfdist.training.strategy_protocol import training_strategy
from tfdist.utils.argument_checks import check_whole_number

_MOST_NAMED = 3  # variables in a message
_CAUSES = f"Faulty memory causes this, and a program that assigns weights on one worker only. {TEST_MEMORY}."


class DifferentWeightsError(DifferentReplicasError):
    """Replicas have different weights or slots, which are equal on all replicas between two steps.

    Attributes:
        ranks: The workers with other bits than the majority; all workers if there is no majority.
    """


class WeightComparison(keras.callbacks.Callback):
    """Compares the weights and slots of all replicas, which are equal between two steps, bit by bit.

    A fault of memory, a bug, or a program that assigns weights on one worker only makes replicas train different models
    without an error. Every `every_steps` steps each worker hashes the weights and the optimizer's variables of its
    devices, and the workers exchange the hashes: 8 bytes a device. What more than half of the replicas have is right:

    - In elastic training a worker with other bits ends with `DifferentWeightsError`. The others log which
      variables differ on it, and train on; started again, it joins with their state.
    - Otherwise, and if no bits are those of more than half of the replicas, as with two workers, all workers raise
      `DifferentWeightsError`, which names replicas and variables. `tfdist run --max-restarts` with `FailureRecovery`
      restarts them from a checkpoint. `FailureRecovery` compares before it saves.

    With `check_gradients` the workers also compute the loss and gradients of some rows again: in turn one of them sends
    the first rows of its last batch, with its batch statistics, to all others, and each device computes them twice,
    with its own weights, as in inference (`training=False`), so that nothing is random. Where bits differ, the loss,
    the norm of all gradients and 4 random projections (Rademacher) may differ by rounding: by the square root of the
    machine epsilon (3.5e-4 in float32), of the whole loss or norm. What more than half of all computations have is
    right, so that of two workers the one with a fault that passes is named, too. A worker with other gradients ends as
    above, with `DifferentGradientsError`. It finds a broken core, and not a fault that passes between two comparisons,
    nor what a separate `train_step` computes beside `compute_loss`.

    What a worker has computed wrongly is in the sums that all have received, for at most `every_steps` steps. Without
    `check_gradients`, wrong gradients of right weights are equal on all, and not found. Workers with different
    processors or versions of TensorFlow may round differently, and their weights are then reported.

    It works where all replicas hold equal copies: under `MirroredStrategy` and `MultiWorkerMirroredStrategy`, elastic
    or not, and not with `shard_optimizer_state`, `LocalSGD` or `DiLoCo`. With one device there is nothing to compare.
    `check_gradients` needs `fit`, a compiled loss or `compute_loss`, and a model for batches of any size. It keeps the
    last batch, runs steps one after another, also with `steps_per_execution`, and needs memory for the gradients of a
    model while it compares.

    >>> import keras, numpy as np
    >>> from tfdist.callbacks import WeightComparison
    >>> from tfdist.strategies import MirroredStrategy
    >>> with MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", loss="mse")
    >>> comparison = WeightComparison(every_steps=2)
    >>> history = model.fit(np.ones([12, 3]), np.ones([12, 1]), batch_size=2, verbose=0, callbacks=[comparison])
    >>> comparison.comparisons
    3

    Attributes:
        comparisons: How often the replicas were compared in this `fit`.
    """

    def __init__(self, every_steps: int = 200, *, check_gradients: float | None = None) -> None:
        """Creates the callback.

        Args:
            every_steps: Compare after this number of training steps.
            check_gradients: The fraction of the rows of a device whose gradients all compute again, rounded up to a
                row. By default none.

        Raises:
            ValueError: `every_steps` is not a number of at least 1, or `check_gradients` not a fraction.
        """
        super().__init__()
        self._progress, self._next = TrainingProgress(), every_steps
        check_whole_number("every_steps", every_steps, at_least=1)
        check_fraction(check_gradients)
        self._every_steps, self._check_gradients = every_steps, check_gradients
        self.comparisons = 0
        check_strategies_early()

    def get_state(self) -> dict[str, Any]:
        """Returns what a restarted training continues with."""
        return {"progress": asdict(self._progress), "next": self._next}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues after the steps of an earlier run."""
        self._progress, self._next = TrainingProgress(**state["progress"]), state["next"]

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks the strategy.

        Raises:
            ValueError: Its replicas do not hold equal copies, or gradients of the model cannot be compared.
        """
        check_equal_replicas(type(self).__name__, self.model)
        self._strategy = training_strategy(self.model.distribute_strategy)
        self._progress, self._next = TrainingProgress(), self._every_steps
        self._variables: dict[str, list[Any]] = {}  # looked up once an epoch
        self.comparisons = 0
        self._gradients: GradientComparison | None = None
        if self._check_gradients is not None and sum(self._strategy.replicas_of_workers) > 1:
            self._gradients = GradientComparison(self._check_gradients, self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._progress = self._progress.in_epoch(epoch)
        self._variables = {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._progress = self._progress.after_batch(last_step(self.model, batch))
        if self._progress.step >= self._next:
            self._next += self._every_steps * ((self._progress.step - self._next) // self._every_steps + 1)
            self.compare()
            if self._gradients is not None:
                self._gradients.compare(self._progress.step // self._every_steps, self._progress.step)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._progress = self._progress.after_epoch()

    def compare(self) -> None:
        """Compares now. All workers call this between the same two steps.

        Raises:
            DifferentWeightsError: Bits differ; see the class.
        """
        if sum(self._strategy.replicas_of_workers) == 1:
            return
        self.comparisons += 1
        variables = self._variables = self._variables or common_variables(self.model)
        own = np.stack([hash_variables(copies) for copies in zip(*variables.values(), strict=True)])
        hashes = values_of_replicas(self._strategy, np.array([[hash_all(row)] for row in own]))
        verdict = vote({replica: int(row[0]) for replica, row in hashes.items()})
        # A worker that has not joined yet repeats the steps of the others, and does not vote.
        votes = any(rank == self._strategy.rank for rank, _ in hashes)
        is_wrong = not votes and verdict.majority is not None and any(hash_all(row) != verdict.majority for row in own)
        if verdict.differing or is_wrong:
            self._report(verdict, len(hashes), list(variables), own, is_wrong=is_wrong)

    def _report(self, verdict: Verdict, voters: int, names: list[str], own: Hashes, *, is_wrong: bool) -> None:
        """Says which variables differ. `is_wrong`: those of this worker, which repeats the steps of the others."""
        # The others make no further exchange if they agree, so that one which joins does not know the variables.
        by_variable = values_of_replicas(self._strategy, own) if verdict.differing else {}
        found = f"{voters} replicas after step {self._progress.step}"
        if verdict.majority is None:
            differ = [len({int(row[place]) for row in by_variable.values()}) > 1 for place in range(len(names))]
            raise DifferentWeightsError(
                "The replicas have different weights, and nobody knows which are right. Received: no bits that more "
                f"than half have, of {found}; different: {_named(names, differ)}. Expected: equal bits on all replicas "
                f"between two steps. {RESTART} Three workers decide by majority. {_CAUSES}",
                sorted({rank for rank, _ in by_variable}),
            )
        right = next((row for replica, row in by_variable.items() if replica not in verdict.differing), None)
        wrong = [
            f"{name_of(self._strategy, one)}: {_named(names, by_variable[one] != right)}" for one in verdict.differing
        ]
        ranks = sorted({rank for rank, _ in verdict.differing})
        if is_wrong:
            wrong.append(f"worker {self._strategy.rank}, which joins: any of {len(names)} variables")
            ranks.append(self._strategy.rank)
        received = "; ".join(wrong)
        message = (
            f"Replicas have other weights than the majority. Received: {received}; of {found}. Expected: equal bits on "
            f"all replicas between two steps. %s {_CAUSES}"
        )
        exclude_workers(self._strategy, DifferentWeightsError, message, ranks)


def _named(names: Sequence[str], differ: Iterable[bool]) -> str:
    found = [name.partition(": ")[2] for name, differs in zip(names, differ, strict=True) if differs]
    rest = f" and {len(found) - _MOST_NAMED} more variables" if len(found) > _MOST_NAMED else ""
    return ", ".join(found[:_MOST_NAMED]) + rest
