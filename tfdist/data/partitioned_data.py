"""The handle of data that workers read where it is: made on the driver, sent to workers, read there by `tf.data`."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.data.block_source import BlockSource
from tfdist.data.tensor_layout import Columns, layout_of
from tfdist.utils.argument_checks import check_whole_number

if TYPE_CHECKING:
    import tensorflow as tf

_SHUFFLED_ROWS = 65536


class PartitionedData:
    """Rows in ordered partitions, which workers read where they are.

    `from_parquet`, `from_spark`, `from_dask` and `from_ray` return it on the driver. Send it to the workers, as an
    argument of the function that they run, or in a closure; call `dataset` there. It can be pickled, and is small: it
    holds no rows.

    What it refers to lives as long as the object that the driver got: files in a `store`, partitions that Dask holds,
    blocks of Ray. `close()`, leaving a `with` block, the end of the driver, or collecting the object as garbage
    releases it. Copies in workers release nothing.
    """

    def __init__(self, source: BlockSource, release: Callable[[], None] | None = None) -> None:
        """Not called by users; `release` releases what the driver holds for the workers."""
        self._source = source
        self._release = release
        self._is_closed = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_release": None}

    def __enter__(self) -> "PartitionedData":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        blocks = len(self._source.rows_of_blocks)
        return f"PartitionedData({self.num_rows} rows in {blocks} blocks, columns {self.columns})"

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return sum(self._source.rows_of_blocks)

    @property
    def rows_of_blocks(self) -> tuple[int, ...]:
        """The number of rows of each block that can be read by itself: a row group of Parquet, a partition."""
        return tuple(self._source.rows_of_blocks)

    @property
    def schema(self) -> Any:
        """The `pyarrow.Schema` of the rows."""
        return self._source.schema

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self._source.schema.names)

    def close(self) -> None:
        """Ends the connection of this process, and on the driver releases what it holds for the workers."""
        self._is_closed = True
        self._source.close()
        if self._release is not None:
            self._release()

    def dataset(
        self,
        batch_size: int,
        *,
        features: Columns | None = None,
        label: Columns | None = None,
        weight: str | None = None,
        shuffle: bool | int = False,
        seed: int | None = None,
        drop_remainder: bool = False,
        dtypes: Mapping[str, Any] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        fill: Mapping[str, Any] | None = None,
        streams: int | None = None,
    ) -> "tf.data.Dataset":
        """Returns a dataset of batches for `fit`, `evaluate` and `predict`. Create the strategy before.

        Its elements are the *global* batches, as those of any dataset that `fit` takes under a strategy. Under
        `tfdist.strategies.MultiWorkerMirroredStrategy` each worker reads only its own rows of each batch, so all
        workers make equally many steps, and each row is used once in an epoch. The position is found again by
        `tfdist.callbacks.FailureRecovery`, shuffled or not.

        Rows are divided into `streams`, contiguous ranges of equal sizes over the ordered partitions, one for each
        worker. A batch takes equally many rows of each. So with several streams rows do not come in the order of the
        files; with `streams=1` they do.

        Numbers and bools become tensors of the same type; lists of one length become vectors, nested ones matrices;
        strings and bytes `tf.string`; dictionaries of Arrow their values. Timestamps, durations and times become int64
        microseconds (timestamps since 1970-01-01 UTC), dates int32 days since then.

        Args:
            batch_size: The number of rows of a global batch.
            features: The column of the model's input; or a list of numeric columns, which become one vector; or a
                dictionary of these by the names of inputs. By default a dictionary of all columns but `label` and
                `weight`.
            label: The targets, given as `features` are. None: elements have features only, as for `predict`.
            weight: The column of the sample weights.
            shuffle: Whether rows come in another order in each epoch: blocks in a random order, then the rows of
                several blocks, at least 65536 of them or as many as this number, in a random order. Rows stay in their
                stream.
            seed: As in `tf.data.Dataset.shuffle`: by default that of `keras.utils.set_random_seed`.
            drop_remainder: Whether to leave out a last batch with fewer rows.
            dtypes: NumPy's dtypes by column, to which numbers are cast, also decimals. The values of a vector have the
                common type of its columns.
            shapes: Shapes of rows by column, for lists whose type has no length, or that hold matrices. By default a
                list has the length of the first row.
            fill: Values by column that replace null. Without one null is an error.
            streams: The number of streams. By default the number of workers in the environment, or that which
                `tfdist run` was to start. After a restart it is that of the checkpoint.

        Returns:
            A dataset of `features`, `(features, label)` or `(features, label, weight)`; tensors of the shape
            `[rows, ...]`. Its `map` is applied to each worker's rows of a batch.

        Raises:
            ValueError: A column does not exist, no tensor can hold its values, or an argument is invalid. While it is
                read, TensorFlow raises `tf.errors.InvalidArgumentError` with the message, for a null for instance.
            RuntimeError: The data was released, or cannot be read.

        >>> import pyarrow.parquet, tempfile
        >>> from tfdist.data import from_parquet
        >>> folder = tempfile.TemporaryDirectory()
        >>> table = pyarrow.table({"height": [1.5, 1.6, 1.7], "age": [7, 8, 9], "kind": [0, 1, 0]})
        >>> pyarrow.parquet.write_table(table, f"{folder.name}/part-0.parquet")
        >>> data = from_parquet(folder.name)
        >>> for x, y in data.dataset(2, features=["height", "age"], label="kind"):
        ...     print(x.numpy().tolist(), y.numpy().tolist())
        [[1.5, 7.0], [1.6, 8.0]] [0, 1]
        [[1.7, 9.0]] [0]
        >>> folder.cleanup()
        """
        from tfdist.data.batch_reader import BatchReader, batch_pipeline, number_of_readers

        check_whole_number("batch_size", batch_size, at_least=1, example=32)
        is_flag = isinstance(shuffle, bool | np.bool_)
        if not is_flag:
            check_whole_number("shuffle", shuffle, at_least=0, example=10000)
        if streams is not None:
            check_whole_number("streams", streams, at_least=1, example=4)
        if self._is_closed:
            raise RuntimeError(
                "This data was closed. Received: a call of `dataset` after `close()` or the `with` block. Expected: "
                "data that the driver still holds. Close it when the training has ended."
            )
        layout = layout_of(self._source, features, label, weight, dtypes, shapes, fill)
        rows = _SHUFFLED_ROWS if is_flag and shuffle else int(shuffle)
        reader = BatchReader(self._source, layout.tensors, rows, owner=self)
        return batch_pipeline(
            reader,
            layout,
            int(batch_size),
            seed=seed,
            drop_remainder=drop_remainder,
            streams=number_of_readers() if streams is None else int(streams),
        )
