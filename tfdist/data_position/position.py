"""The position in the training data, as a checkpoint holds it."""

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tfdist.utils.json_state import from_json, to_json

Json = dict[str, Any]


@dataclass(frozen=True)
class Position:
    """A position between two steps, as one worker sees it: every rank saves its position.

    A batch is what one step of all replicas takes from the data. Iterators are those that `fit` has created over the
    training data: one or two per epoch, and those that build the model.

    Attributes:
        next_step: The next step of the epoch, from 0; 0 at the end of an epoch.
        finished: Number of batches drawn from each iterator that is not used any more.
        current: Number of batches drawn from the iterator in use; `None` if the next epoch creates a new one.
        num_batches: Number of batches of an iterator, if known.
        steps_per_epoch: As given to `fit`.
        steps_per_execution: As given to `compile`.
        source: The kind of data.
        order: Everything else that determines the order, by kind of data: seeds, states of random generators, calls of
            a PyDataset's hooks, or its `get_state()`. Any value that `tfdist.utils.json_state.to_json` accepts.
        validation_drawn: Number of batches drawn from each iterator over the validation data.
        validation_shares_shuffle: Whether the validation data comes from the same shuffle as the training data.
        batch_size: Number of samples in a batch of all workers, if known.
        elements: The parts of a batch, each with its path, dtype and dimensions except the first, if known.
        is_per_worker: Whether each worker has a different position, in different data: other files, for instance.
        logs: What the last step logged, if given.

    >>> position = Position(3, (6, 0), 3, 6, None, 1, "tf.data.Dataset", {"seeds": [[1, 2]]}, logs={"loss": 0.5})
    >>> Position.from_json(position.to_json()) == position
    True
    """

    next_step: int
    finished: tuple[int, ...]
    current: int | None
    num_batches: int | None
    steps_per_epoch: int | None
    steps_per_execution: int
    source: str
    order: Json
    validation_drawn: tuple[int, ...] = ()
    validation_shares_shuffle: bool = False
    batch_size: int | None = None
    elements: list[Any] | None = None
    is_per_worker: bool = False
    logs: Json | None = None

    @property
    def drawn(self) -> tuple[int, ...]:
        """Number of batches drawn from each iterator, the one in use last."""
        return self.finished if self.current is None else (*self.finished, self.current)

    def to_json(self) -> Json:
        """Returns the position as JSON."""
        logs = None if self.logs is None else to_json(self.logs, name="logs")
        counts = {"finished": list(self.finished), "validation_drawn": list(self.validation_drawn)}
        return {**asdict(self), **counts, "order": to_json(self.order, name="data"), "logs": logs}

    @classmethod
    def from_json(cls, json: Json) -> "Position":
        """Returns the position that `to_json` has written.

        Raises:
            ValueError: If `json` is not a position.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(json, dict) or set(json) != names:
            raise ValueError(
                f"Invalid position in the training data. Received: {sorted(json)}. Expected: {sorted(names)}. Another "
                "version of tfdist may have written it."
            )
        counts = {name: tuple(json[name]) for name in ("finished", "validation_drawn")}
        decoded = {name: from_json(json[name]) for name in ("order", "logs")}
        return cls(**{**json, **counts, **decoded})


def logs_to_save(logs: Mapping[str, Any] | None) -> Json | None:
    """Converts scalars to Python floats, as Keras gives them to callbacks; leaves other values, such as vectors.

    >>> import numpy as np
    >>> logs_to_save({"loss": np.float32(0.5), "f1": np.ones([2])})
    {'loss': 0.5, 'f1': array([1., 1.])}
    """
    if logs is None:
        return None
    converted = dict(logs)
    for name, value in logs.items():
        with contextlib.suppress(TypeError, ValueError):
            converted[name] = float(value)
    return converted
