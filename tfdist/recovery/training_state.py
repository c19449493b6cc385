"""All that a training consists of beside its data, as the shards of a checkpoint."""

import warnings
from collections.abc import Sequence
from typing import Any

import keras

from tfdist.checkpoint import Checkpoint, Shard
from tfdist.keras_internals.accumulation import Accumulation
from tfdist.recovery import callback_state, generators
from tfdist.recovery.host_copies import HostCopies
from tfdist.recovery.replicas import merge
from tfdist.recovery.variables import TrainingVariables


class TrainingState:
    """The variables of a model's training, its callbacks, and the random generators of this process."""

    def __init__(self, model: Any, callbacks: Sequence[keras.callbacks.Callback], element_spec: Any) -> None:
        """Makes the variables that Keras would make in the first step.

        Args:
          model: a compiled model.
          callbacks: those that `fit` calls, but for the one that recovers.
          element_spec: of the batches; see `TrainingVariables.build`.

        Raises:
          ValueError: a callback would restore the training, too.
          RuntimeError: the shapes of a batch are not known.
        """
        callback_state.refuse_others(callbacks)
        self._model, self._callbacks = model, callbacks
        self._replicas = int(model.distribute_strategy.num_replicas_in_sync)
        self._copies = HostCopies()
        self._variables = TrainingVariables(model, self._copies)
        self._variables.build(element_spec)

    def warn_of_callbacks(self) -> None:
        """Warns of callbacks of which nothing tells what they remember."""
        if unknown := callback_state.without_state(self._callbacks):
            warnings.warn(
                f"After a restart these callbacks start anew: {', '.join(unknown)}. If they remember something between "
                "steps, give them the methods `get_state` and `set_state` (tfdist.recovery.callback_state).",
                stacklevel=3,
            )

    def snapshot(self, notes: dict[str, Any], *, is_chief: bool) -> tuple[Shard | None, Shard]:
        """Holds on to what all ranks share, of which the chief takes care, and what this one has.

        The arrays are filled by `finish_snapshot`, with the values of now. The next snapshot writes over them.

        Args:
          notes: of this rank, to be saved with it.
          is_chief: whether this is rank 0.
        """
        remembered = callback_state.state_of(self._callbacks)
        random_state = generators.python_and_numpy_state()
        own_notes = {**notes, "generators": random_state, "callbacks": remembered.notes}
        if not is_chief:
            return None, Shard(self._variables.own(), own_notes)
        shared, own, description = self._variables.everything()
        return Shard({**shared, **remembered.tensors}, {"description": description}), Shard(own, own_notes)

    def finish_snapshot(self) -> None:
        """Copies to host memory, in any thread; until then what the next steps change takes additional memory."""
        self._copies.finish()

    def accumulate_as_in(self, checkpoint: Checkpoint) -> None:
        """Makes an update of as many micro-steps as when the checkpoint was saved."""
        accumulation = Accumulation(self._model)
        saved_steps = checkpoint.shared().notes["description"]["accumulation_steps"]
        if accumulation.steps != saved_steps:
            accumulation.change(saved_steps)

    def restore(self, checkpoint: Checkpoint, rank: int, workers: int, *, metrics: bool) -> None:
        """Puts back what a checkpoint has, for other ranks and replicas than saved it, too.

        Args:
          checkpoint: whole.
          rank: of this worker.
          workers: how many there are now.
          metrics: whether the metrics, too, of an epoch that goes on.

        Raises:
          ValueError: the checkpoint is of another training; nothing was touched then.
        """
        shared = checkpoint.shared()
        description = shared.notes["description"]
        same_workers = checkpoint.world == workers and description["replicas"] == self._replicas
        shard = checkpoint.of_rank(rank if same_workers else 0)
        own = shard.tensors
        if not same_workers:
            own = merge([checkpoint.of_rank(other).tensors for other in range(checkpoint.world)])
        variables = {name: value for name, value in shared.tensors.items() if not name.startswith("callbacks/")}
        self._variables.check(variables, own, description)
        callback_state.check(self._callbacks, shard.notes["callbacks"], all_present=same_workers)
        generators.check(shard.notes["generators"])

        self._variables.restore_shared(variables, description)
        self._variables.restore_own(own, description)
        if metrics:
            self._variables.restore_metrics(own, description)
        callback_state.restore(self._callbacks, shard.notes["callbacks"], shared.tensors)
        generators.restore(shard.notes["generators"])
