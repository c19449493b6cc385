"""Calls strategies at the beginning and the end of an epoch of `fit`, `evaluate` and `predict`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tfdist.keras_internals.keras_symbols import BASE_TRAINER, TensorFlowTrainer, trainer
from tfdist.patches import patch, replace
from tfdist.private_symbols import private

private(f"{BASE_TRAINER}._get_metrics_result_or_logs", "chooses the logs of an epoch that callbacks get")


@patch
def patch_local_epochs(
    is_ours: Callable[[Any], bool],
    begin: Callable[[Any, bool, bool], None],
    end: Callable[[Any, bool], None],
    mean_of_workers: Callable[[Any, list[float]], list[float]],
) -> None:
    """Calls `begin` and `end` around the loop over each epoch, and averages logs that only one worker has computed.

    Args:
        is_ours: Whether a strategy lets workers train by themselves; under others nothing changes.
        begin: Takes the strategy, whether the epoch is one of training, and whether it has a number of steps that all
            workers know, so that none has to ask whether the others' data has ended.
        end: Takes the strategy and whether the epoch was one of training, which no exception has ended.
        mean_of_workers: Takes the strategy and this worker's logs of an epoch that are not results of metrics; returns
            the logs for all workers.
    """
    stock = trainer.TFEpochIterator

    class ReportingEpochIterator(stock):  # type: ignore[misc, valid-type]
        """Keras' epoch iterator, which reports the beginning and the end of an epoch."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._is_over_training_data = "class_weight" in kwargs  # only training has them

        @contextmanager
        def catch_stop_iteration(self) -> Iterator[None]:
            batches, strategy = self._num_batches, self._distribute_strategy
            if not is_ours(strategy):
                with super().catch_stop_iteration():
                    yield
                return
            knows_end = self.steps_per_epoch is None and bool(batches) and batches % self.steps_per_execution == 0
            asks = getattr(self._distributed_dataset, "_enable_get_next_as_optional", False)
            begin(strategy, self._is_over_training_data, knows_end or not asks)
            is_complete = False
            try:
                with super().catch_stop_iteration():
                    yield
                is_complete = True
            finally:
                end(strategy, self._is_over_training_data and is_complete)

    ReportingEpochIterator.__name__ = stock.__name__
    replace(trainer, "TFEpochIterator")(ReportingEpochIterator)
    results_or_logs = TensorFlowTrainer._get_metrics_result_or_logs

    @replace(TensorFlowTrainer, "_get_metrics_result_or_logs")
    def results_or_mean_logs(self: Any, logs: Any) -> Any:
        chosen = results_or_logs(self, logs)
        if not is_ours(self.distribute_strategy) or not isinstance(chosen, dict):
            return chosen
        if chosen.keys() == self.get_metrics_result().keys():
            return chosen
        numbers = {name: value for name, value in chosen.items() if _is_number(value)}
        means = mean_of_workers(self.distribute_strategy, [float(value) for value in numbers.values()])
        return {**chosen, **dict(zip(numbers, means, strict=True))}


def _is_number(value: Any) -> bool:
    return not isinstance(value, str) and getattr(value, "shape", ()) == ()
