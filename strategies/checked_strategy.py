"""Uses of a strategy that raise one clear error once the collectives of the process are aborted."""

from typing import TYPE_CHECKING, Any

from tfdist.tensorflow_internals.aborted_collectives import check_collectives

if TYPE_CHECKING:
    from tensorflow.distribute import Strategy as _Strategy
else:
    _Strategy = object


class CheckedStrategy(_Strategy):
    """Mixin for a subclass of `tf.distribute.Strategy`: checks the collectives before data and values are used."""

    def check_workers(self) -> None:
        """Raises an error if a reduction or gathering over several workers cannot run any more."""
        if self.num_workers > 1:  # within one process they need no collectives
            check_collectives()

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the values of all replicas; see `tf.distribute.Strategy.gather`."""
        self.check_workers()
        return super().gather(value, axis)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Distributes the global batches of a dataset; see `tf.distribute.Strategy.experimental_distribute_dataset`."""
        check_collectives()
        return super().experimental_distribute_dataset(dataset, options)

    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any = None) -> Any:
        """Distributes the datasets of workers; see `tf.distribute.Strategy.distribute_datasets_from_function`."""
        check_collectives()
        return super().distribute_datasets_from_function(dataset_fn, options)
