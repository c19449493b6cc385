"""The position in the training data: where `fit` goes on, in the middle of an epoch, with the samples that are left."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tfdist.keras_internals.resumable_iterator import ResumableIterator, Skipped, install_resumable_iterator
from tfdist.keras_internals.running_fit import RunningFit, running_fit
from tfdist.recovery.json_values import from_json, to_json
from tfdist.recovery.step_logs import logs_to_save

__all__ = [
    "Position",
    "Skipped",
    "TrainingIterator",
    "install_resumable_iterator",
    "start_at_epoch",
    "training_iterator",
]

Json = dict[str, Any]


@dataclass(frozen=True)
class Position:
    """A position between two steps. It holds a worker's own view: every rank saves its own.

    A batch is what a step of all replicas takes from the data. Iterators are those that `fit` has made of the
    training data, one or two an epoch, also to build the model.

    Attributes:
      next_step: the step of the epoch that comes next, from 0; 0 at the end of an epoch.
      finished: how many batches were drawn of each iterator that will not be drawn from again.
      current: how many were drawn of the one in use; `None` if the next epoch makes a new one.
      num_batches: how many batches an iterator has, where that is known or has been found out.
      steps_per_epoch: as given to `fit`.
      steps_per_execution: as given to `compile`.
      source: the kind of data.
      order: what else decides the order, by kind: seeds, states of random generators, calls of a PyDataset's hooks, or
        what it tells by `get_state`: anything that `tfdist.recovery.json_values.to_json` takes.
      validated: how many batches were drawn of each iterator of the validation data.
      batch_size: how many samples a batch of all workers has, where that is known.
      elements: the parts of a batch, each with its path, dtype and dimensions but for the first, where they are known.
      is_each_workers_own: whether other workers are at other positions, in data of their own: files, for instance.
      is_validated_by_itself: whether the validation data is made from the same shuffle as the training data.
      logs: what the last step has logged, if that was said.

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
    validated: tuple[int, ...] = ()
    is_validated_by_itself: bool = False
    batch_size: int | None = None
    elements: list[Any] | None = None
    is_each_workers_own: bool = False
    logs: Json | None = None

    def to_json(self) -> Json:
        """The position as JSON."""
        logs = None if self.logs is None else to_json(self.logs, name="logs")
        counts = {"finished": list(self.finished), "validated": list(self.validated)}
        return {**asdict(self), **counts, "order": to_json(self.order, name="data"), "logs": logs}

    @classmethod
    def from_json(cls, json: Json) -> "Position":
        """The position that `to_json` has written.

        Raises:
          ValueError: it is none.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(json, dict) or set(json) != names:
            raise ValueError(
                f"This is no position in the training data. Received: {sorted(json)}. Expected: {sorted(names)}. It "
                "may have been written by another version of tfdist."
            )
        counts = {name: tuple(json[name]) for name in ("finished", "validated")}
        decoded = {name: from_json(json[name]) for name in ("order", "logs")}
        return cls(**{**json, **counts, **decoded})


class TrainingIterator:
    """The training data of a running `fit`."""

    def __init__(self, fit: RunningFit) -> None:
        self._fit = fit
        self._iterator: ResumableIterator = fit.iterator

    @property
    def skipped(self) -> Skipped:
        """What `resume_at` has cost so far; whole once the first batch has begun."""
        return self._iterator.skipped

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of the batches; `None` where the data does not tell."""
        return self._iterator.element_spec

    def at_end_of_fit(self, function: Callable[[], object]) -> None:
        """Calls `function` when this `fit` is over, by an exception, too."""
        self._fit.at_end(function)

    def position(self, next_step: int, logs: Mapping[str, Any] | None = None) -> Position:
        """The position behind the steps made so far.

        Args:
          next_step: the step of the epoch that comes next: in `on_train_batch_end(batch)` it is `batch + 1`, in
            `on_epoch_end` 0.
          logs: what `on_train_batch_end` was given: numbers and arrays. Needed where this was the epoch's last step and
            the model's own `train_step` logs something else than its metrics.
        """
        return Position(**self._iterator.position(next_step), logs=logs_to_save(logs))

    def resume_at(self, position: Position, *, replay: bool = False, same_workers: bool = True) -> None:
        """Makes the first epoch of this `fit` go on at `position`; to be called once, in `on_train_begin`.

        Which epoch that is, `start_at_epoch` says.

        It may run the data's own code (a PyDataset's hooks, batches drawn again), so restore the generators of
        Python, NumPy and Keras after it.

        Args:
          position: where to go on.
          replay: whether a Python generator, which only begins anew, may be drawn and thrown away up to there. It must
            yield the same batches in every run.
          same_workers: whether as many workers train as when the position was taken. If not, and the workers have data
            of their own, a warning says what that means.

        Raises:
          ValueError: the data, or the arguments of `fit`, are not those of the run that is to go on.
          RuntimeError: the data cannot be had again from there: a generator without `replay`, or data that was drawn
            from more often than before.
        """
        self._iterator.resume_at(position, replay=replay, same_workers=same_workers)
        if position.next_step > 0:
            self._fit.supply_logs(position.logs)


def training_iterator(model: Any) -> TrainingIterator:
    """The training data of the `fit` of `model` that runs; to be called in `on_train_begin`, and at will after it.

    The first call of a `fit` warns of data whose order another process cannot have again.

    Args:
      model: the Keras model.

    Raises:
      RuntimeError: no `fit` of `model` runs in this thread, or one that began before `install_resumable_iterator`.
    """
    fit = _running_fit(model)
    fit.iterator.follow()
    return TrainingIterator(fit)


def start_at_epoch(model: Any, epoch: int | None) -> None:
    """Makes the running `fit` of `model`, and no later one, begin with `epoch`; to be called in `on_train_begin`.

    Args:
      model: the Keras model.
      epoch: from 0; with 0 or `None`, `fit` begins with the `initial_epoch` that it was given.

    Raises:
      RuntimeError: no `fit` of `model` runs in this thread, or one that began before `install_resumable_iterator`.
    """
    _running_fit(model).start_at_epoch(epoch)


def _running_fit(model: Any) -> RunningFit:
    fit = running_fit(model)
    if fit is None or not isinstance(fit.iterator, ResumableIterator):
        raise RuntimeError(
            "The training data of a model is known only while `fit` runs. Received: a model "
            f"({getattr(model, 'name', model)!r}) that is not fitted now, or whose `fit` began before tfdist could "
            "look. Expected: a call in a callback, from `on_train_begin` on, and `install_resumable_iterator()` before "
            "`fit`."
        )
    return fit
