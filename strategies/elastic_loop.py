"""Custom training loops whose workers may be lost and join while the others train."""

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.data_position.dataset_source import DatasetSource
from tfdist.data_position.loader_source import LoaderSource
from tfdist.data_position.loop_passes import LoopPasses
from tfdist.elastic.loop_member import LoopMember


class ElasticLoop:
    """A custom training loop that continues when workers are lost, and that workers join, as `fit` does.

    Its steps are functions; a call of one counts on all workers or on none. If a worker is lost meanwhile, what the
    call has written is taken back, and the function is called again with the same arguments; those that are left
    compute the rows of the lost one. A worker that joins takes over `state` between two batches, and continues at that
    place of the loop: `epochs` begins with the epoch of the others, and `batches` with their batch. See
    `docs/elastic.md`.

    Under other strategies, and without `elastic`, the functions are called as they are.

    >>> import keras
    >>> import tensorflow as tf
    >>> from tfdist.strategies import ElasticLoop, MirroredStrategy
    >>> strategy = MirroredStrategy(["CPU:0"])  # or MultiWorkerMirroredStrategy(), under `tfdist run --elastic`
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    ...     optimizer = keras.optimizers.SGD(0.1)
    ...     optimizer.build(model.trainable_variables)
    ...     mean_loss = keras.metrics.Mean()
    >>> loop = ElasticLoop(strategy, [model, optimizer, mean_loss])
    >>> def on_replica(x, y):
    ...     with tf.GradientTape() as tape:
    ...         losses = tf.reduce_sum((y - model(x)) ** 2, axis=1)
    ...         loss = tf.nn.compute_average_loss(losses, global_batch_size=4)
    ...     weights = model.trainable_variables
    ...     optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    ...     mean_loss.update_state(losses)
    >>> @loop.step
    ... @tf.function
    ... def train_step(x, y):
    ...     strategy.run(on_replica, args=(x, y))
    >>> data = tf.data.Dataset.from_tensor_slices((tf.ones([8, 1]), tf.ones([8, 1]))).batch(4)
    >>> for epoch in loop.epochs(2):
    ...     mean_loss.reset_state()
    ...     for x, y in loop.batches(data):
    ...         train_step(x, y)
    ...     print(epoch, round(float(mean_loss.result()), 3))
    0 0.68
    1 0.088

    Attributes:
        epoch: The present epoch.
        batch: How many batches the present pass has drawn, by workers that were there before, too.
        steps: How many batches all passes have drawn.
    """

    def __init__(self, strategy: Any, state: Any) -> None:
        """Creates the loop. All workers call this at the same place of the program.

        Args:
            strategy: The strategy under which the loop trains.
            state: All that its steps write: models, layers, optimizers, metrics, variables and random generators, in
                lists or dicts. Their variables exist already. And objects with `get_state` and `set_state`, which a
                worker that joins gets, too; what they return and take is JSON, NumPy arrays or scalars.

        Raises:
            ValueError: With `elastic`: something in `state` cannot be taken back or sent.
        """
        elastic = getattr(strategy, "_elastic", None)
        self._strategy = strategy
        self._member: LoopMember | None = None if elastic is None else elastic.loop_member(state)
        is_elastic = self._member is not None
        self._passes = LoopPasses(self._source_of, is_tracked=is_elastic, needs_same_order=True)
        self._has_begun = self._has_epochs = False

    @property
    def epoch(self) -> int:
        return self._passes.epoch

    @property
    def batch(self) -> int:
        return self._passes.batch

    @property
    def steps(self) -> int:
        return self._passes.steps

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function whose calls are steps of the loop; a decorator.

        A step writes nothing but the loop's `state`: anything else would not be taken back. `strategy.run` is called
        in steps only.

        Args:
            function: Computes on a batch, in training or evaluation; a `tf.function`, or one that calls some. All
                workers call it in the same order. What it returns is what the call returns.
        """
        return function if self._member is None else self._member.step(function)

    def epochs(self, number: int) -> Iterator[int]:
        """Yields the numbers of epochs from 0 to `number - 1`; on a worker that joins, from the epoch of the others.

        Raises:
            ValueError: It is the second call for this loop.
            JoinError, TimeoutError: This worker joins, and none that trains sends its state.
        """
        if self._has_epochs:
            raise ValueError(
                "The epochs of an ElasticLoop are numbered once, so that a worker that joins finds its place. "
                "Received: a second call of `epochs`. Expected: one. Create another ElasticLoop for further epochs."
            )
        self._has_epochs = True
        self._begin()
        yield from self._passes.epochs(number)

    def batches(self, dataset: Any, steps: int | None = None) -> Iterator[Any]:
        """Yields the batches of a pass over data; on a worker that joins, from the batch of the others.

        Workers join between two of these batches, but not within a pass that is a part of another one, as a validation
        every 100 batches. Datasets are created before the loop, and the passes of an epoch draw from them in the same
        order. Do not count batches by `enumerate` or `islice`, which begin with 0 on a worker that joins, but read
        `batch`.

        Args:
            dataset: A `tf.data.Dataset` of global batches, or one that the strategy has distributed; a dataset or a
                loader of Grain; torchdata's `StatefulDataLoader`.
            steps: After how many batches the pass ends, if not with the data.

        Raises:
            ValueError: The data is of another kind, or a loader within a pass over it; or this worker joins, and its
                data or the passes of its program are others.
        """
        self._begin()
        member = None if self._passes.is_in_pass else self._member
        restore_signal = (lambda: None) if member is None else member.handle_signal()
        try:
            for batch in self._passes.batches(dataset, steps):
                yield batch
                if member is not None:
                    member.after_batch(self._passes.position)
        finally:
            restore_signal()

    def _begin(self) -> None:
        if not self._has_begun and self._member is not None and (position := self._member.begin()) is not None:
            self._passes.resume_at(position, self._member.resume)
        self._has_begun = True

    def _source_of(self, dataset: Any) -> DatasetSource:
        if isinstance(dataset, tf.data.Dataset):
            distributed = self._strategy.experimental_distribute_dataset(dataset)
            source = DatasetSource(None, distributed, self._strategy)
        elif isinstance(dataset, tf.distribute.DistributedDataset):
            source = DatasetSource(None, dataset, self._strategy)
        elif (of_loader := LoaderSource.of_loop(dataset, self._strategy)) is not None:
            source = of_loader
        else:
            raise ValueError(
                f"Invalid data of an ElasticLoop. Received: {type(dataset).__name__}. Expected: a tf.data.Dataset of "
                "global batches, one that `strategy.experimental_distribute_dataset` has distributed, a dataset of "
                "Grain, or torchdata's StatefulDataLoader. Make one by "
                "`tf.data.Dataset.from_tensor_slices(arrays).batch(size)`, or by `from_generator`."
            )
        if self._member is not None:
            source.dataset = self._strategy._carry_counts(source.dataset, None)
        return source
