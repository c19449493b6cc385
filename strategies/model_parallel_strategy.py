"""ModelParallelStrategy: a model whose layers are on several devices, of this process or of several workers."""

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import cluster
from tfdist.collectives import CommunicationStats, CompressionState, LinkStats
from tfdist.compression import Policy
from tfdist.keras_internals.functional_graph import graph_of
from tfdist.keras_internals.model_introspection import bound_step, is_predict_step, predicting_model
from tfdist.keras_internals.strategy_patches import patch_keras
from tfdist.pipeline.column_reduction import ColumnReduction
from tfdist.pipeline.columns import Columns
from tfdist.pipeline.micro_batch_loss import MicroBatchLoss, current_stage_loss
from tfdist.pipeline.pipeline import Pipeline, schedule_picture
from tfdist.pipeline.placed_models import PlacedModels, check_model_for_stages, variable_bytes_by_device
from tfdist.pipeline.stages import measured_costs, stage_table, stages_of
from tfdist.pipeline.transfers import DENSE, UPDATES, LinkCounters
from tfdist.servers.server_monitor import ServerMonitor, wait_for_servers
from tfdist.servers.serving import serve
from tfdist.strategies.cluster_resolver import start_timeout_of
from tfdist.strategies.replicated_strategy import Compression
from tfdist.strategies.version_canaries import check_installed_versions
from tfdist.strategies.worker_start import cpu_instructions_of
from tfdist.strategy_hooks import StrategyHooks, hooks_of
from tfdist.tensor_parallel.sharded_columns import ShardedColumns
from tfdist.tensor_parallel.sharded_stage import shard_table
from tfdist.tensor_parallel.split_variable import ShardCreation, ShardLayout
from tfdist.tensorflow_internals.placed_strategy import PlacedExtended
from tfdist.tensorflow_internals.runtime import exclude_from_autograph
from tfdist.tensorflow_internals.tensorflow_symbols import resolved_device
from tfdist.tensorflow_internals.xla_functions import leave_xla_to_users
from tfdist.training.strategy_protocol import TrainingStrategy
from tfdist.utils.argument_checks import check_whole_number


class ModelParallelStrategy(tf.distribute.Strategy, TrainingStrategy):
    """Training of a model that is cut into stages, each of them on a separate device.

    `fit`, `evaluate` and `predict` compute each batch in micro-batches, so that the stages work at the same time.
    The result is that of one process on the complete batch. The devices are those of workers
    (`tfdist run --chief --workers N script.py`) or of this process. Under another launcher that sets `TF_CONFIG`, run
    the script as every task: in the process of a worker this constructor serves until the chief has ended, then exits.

    ```python
    strategy = ModelParallelStrategy(pipeline=Pipeline(stages=2, micro_batches=8))
    with strategy.scope():
        model = build_model()
        model.compile("adam", loss=...)
    model.fit(x, y, epochs=3)
    ```

    Attributes:
        pipeline: The options of the pipeline.
        columns: By column and stage, the full name of the device. With a `layout_map`, the devices that share a stage
            are in neighbouring columns.
        servers: Notices that a worker is lost; None without workers.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
        pipeline: Pipeline,
        data_parallel: int = 1,
        layout_map: Any = None,
        compression: Compression = None,
        start_timeout_seconds: float | None = None,
    ) -> None:
        """Creates the strategy.

        Args:
            devices: `stages` devices for each column (with `layout_map` times those of a stage), column after column:
                "CPU:0", "GPU:1", or a device of another task ("/job:worker/task:1/device:CPU:0"). By default those of
                all workers in their order, or without workers those of this process: of each process its GPUs, or its
                CPU devices if it has none.
            pipeline: How the model is cut, and in which order micro-batches are computed.
            data_parallel: The number of columns: copies of all stages, each of which computes a part of every batch.
            layout_map: A `keras.distribution.LayoutMap`, which splits variables over the devices of a stage. Each stage
                then has as many devices as the axes of its mesh that the layouts use, by their product; they are
                adjacent in `devices`. By default each stage has one device.
            compression: The compression of the gradients that columns send to each other, with residuals for each
                column: a `tfdist.compression.Compressor`, its name ("int8", "powersgd:4"), a mapping from regular
                expressions over variable paths to these, or a `tfdist.compression.Policy`. No compression by default.
                See `docs/compression.md`.
            start_timeout_seconds: How long to wait for workers. By default the value of
                `tfdist run --start-timeout`, or 300.

        Raises:
            ValueError: An argument is invalid, there are too few or too many devices, or the environment describes a
                cluster of other jobs than a chief and workers.
            TimeoutError: Workers did not start in time; the message names them.
        """
        if not isinstance(pipeline, Pipeline):
            raise ValueError(
                f"Invalid `pipeline`. Received: {pipeline!r}. Expected: tfdist.strategies.Pipeline(stages=...)."
            )
        check_whole_number("data_parallel", data_parallel, at_least=1)
        policy = compression if isinstance(compression, Policy) else Policy(compression)
        self.servers = connect_to_workers(start_timeout_of(start_timeout_seconds))
        layout = None if layout_map is None else ShardLayout(layout_map)
        self._layout = layout if layout is not None and layout.ways > 1 else None
        ways = 1 if self._layout is None else self._layout.ways
        resolved = _checked_devices(devices, pipeline.stages, data_parallel, ways)
        self.pipeline, self.data_parallel, self.compression = pipeline, data_parallel, compression
        self.columns = _columns(resolved, pipeline.stages, ways)
        self._chief = resolved_device("CPU:0")
        extended = PlacedExtended(self, self._chief, self.columns[0], resolved)
        super().__init__(extended)
        self._create_in_parts = None
        columns: Callable[[], Columns] = functools.partial(Columns, self.columns)
        if self._layout is not None:
            self._create_in_parts = ShardCreation(self._layout, self.columns, extended)
            columns = functools.partial(ShardedColumns, self.columns, self._layout)
        if policy.compresses:
            compare_cpus_of_columns(self.columns)
        first_devices = [column[0] for column in self.columns] if policy.compresses else []
        shape_of = None if self._layout is None else self._layout.shape_of_part
        self._compression_state = CompressionState(policy if policy.compresses else None, first_devices, shape_of, ways)
        reduction = ColumnReduction(policy, self._compression_state)
        self._counters = LinkCounters(self._chief)
        self._placed = PlacedModels(self, pipeline, columns, self._chief, reduction, self._counters)
        patch_keras(ModelParallelStrategy, HOOKS)
        exclude_from_autograph()
        check_installed_versions(is_chief=True)

    @property
    def replicas_of_workers(self) -> tuple[int, ...]:
        """1: all devices together compute one replica."""
        return (1,)

    @property
    def communication(self) -> CommunicationStats:
        """What all devices have sent to each other so far.

        `gradient_bytes` and `wire_bytes` are the gradients of weights, `other_bytes` the rest. Numbers of collectives
        are not counted.
        """
        counts, links = self._counters.count(), self.communication_by_link().values()
        gradients = sum(link.weight_gradient_bytes for link in links)
        return CommunicationStats(
            gradient_bytes=gradients,
            wire_bytes=gradients,
            dense_bytes=sum(by_kind.get(DENSE, 0) for by_kind in counts.values()),
            other_bytes=sum(link.total_bytes for link in links) - gradients,
            updates=counts.get(("", ""), {}).get(UPDATES, 0),
        )

    def communication_by_link(self, step: str | None = None) -> dict[tuple[str, str], LinkStats]:
        """Returns what each device has sent to each other one so far.

        Args:
            step: Counts one kind of steps: "train_step", "test_step" or "predict_step". None: all.

        Returns:
            By the full names of the sending and the receiving device; without links over which nothing was sent.
        """
        return {
            link: LinkStats(**{kind: number for kind, number in by_kind.items() if kind != DENSE})
            for link, by_kind in self._counters.count(step).items()
            if link != ("", "") and any(by_kind.values())
        }

    def variable_bytes_by_device(self, model: Any) -> dict[str, int]:
        """Returns the bytes of weights and of the optimizer's variables that each device holds.

        Args:
            model: A model of this strategy; after its first step, when its variables are on the devices of its stages.

        Returns:
            By the full name of a device.
        """
        return variable_bytes_by_device(model)

    @property
    def compression_state(self) -> CompressionState:
        """The state that the compressors keep from step to step, for each column; those of its stages are on them."""
        return self._compression_state

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Runs `fn`; a step of a Keras model runs in stages.

        Raises:
            ValueError: The model's step cannot run in stages. The message gives the reason and the remedy.
        """
        model, name = bound_step(fn)
        if model is None and is_predict_step(fn):
            model, name = predicting_model(fn), "predict_step"
        if model is None or name is None:
            return super().run(fn, args, kwargs, options)
        check_model_for_stages(model, self, name)
        step = self._placed.step(model, keras.utils.unpack_x_y_sample_weight(args[0])[0], name)
        step_function = {"train_step": step.train, "test_step": step.test, "predict_step": step.predict}[name]
        return super().run(step_function, args, kwargs, options)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Returns `dataset`: this process draws from it and sends parts of its batches to the stages."""
        del options
        return dataset

    def summary(self, model: Any, print_fn: Callable[[str], Any] | None = None) -> None:
        """Prints the stages of a model (layers, parameters, what is sent), the expected bubble, and the schedule.

        With a `layout_map` also what the devices of a stage send to each other, layer by layer.

        Args:
            model: A built Functional or Sequential model; a subclassed model after its first batch.
            print_fn: Takes each line; by default `print`.

        Raises:
            ValueError: The model has no graph yet, or cannot be cut.
        """
        stages = self._placed.stages_of(model) or stages_of(graph_of(model), self.pipeline)
        lines = [*stage_table(stages, self.pipeline, self.columns), *schedule_picture(self.pipeline)]
        if self._layout is not None:
            lines += shard_table(model, stages, self._layout.axes_of(stages.variables), self._layout.ways)
        for line in lines:
            (print_fn or print)(line)

    def measure_costs(self, model: Any, x: Any) -> dict[str, float]:
        """Measures the time of each layer on the device of the first stage, for `Pipeline(costs=...)`.

        Store the result, and give it to the pipeline of each later run: then all of them cut the model equally.

        Args:
            model: A Functional or Sequential model, or a subclassed one that is built.
            x: The inputs of one micro-batch, a structure of arrays or tensors.

        Returns:
            By the name of a layer, the seconds of its forward and backward pass, in the order of the layers.

        Raises:
            ValueError: The model has no graph.
        """
        x = tf.nest.map_structure(tf.convert_to_tensor, x)
        with self.scope():
            return measured_costs(graph_of(model, x), x, self.columns[0][0])


def _columns(devices: Sequence[str], stages: int, ways: int) -> tuple[tuple[str, ...], ...]:
    """Returns the devices by column and stage; columns that share stages are neighbours."""
    copies = [devices[first : first + stages * ways] for first in range(0, len(devices), stages * ways)]
    return tuple(tuple(of_copy[rank::ways]) for of_copy in copies for rank in range(ways))


def _checked_devices(devices: Sequence[str] | None, stages: int, columns: int, ways: int) -> list[str]:
    """Returns the full names of the devices."""
    chosen_devices = default_devices() if devices is None else devices
    needed = stages * columns * ways
    if isinstance(chosen_devices, str) or len(chosen_devices) != needed:
        raise ValueError(
            f"The number of devices differs from stages times columns. Received: {stages} stages, data_parallel="
            f"{columns}, {ways} devices for each stage, and the devices {chosen_devices!r}"
            f"{'' if devices is not None else ', all that there are'}. Expected: {needed} devices. Start as many "
            f"workers (tfdist run --chief --workers {needed}), change the stages, `data_parallel` or the mesh of "
            "`layout_map`, or name the `devices`."
        )
    resolved = [resolved_device(device) for device in chosen_devices]
    if len(set(resolved)) != len(resolved):
        raise ValueError(
            f"Two stages have the same device. Received: devices={list(chosen_devices)}. Expected: different devices. "
            "Several CPU devices of one process are created by `tf.config.set_logical_device_configuration`."
        )
    existing = {resolved_device(device.name) for device in tf.config.list_logical_devices()}
    if unknown := sorted(set(resolved) - existing):
        raise ValueError(
            f"There are no such devices. Received: {unknown}. Expected: some of {sorted(existing)}. Correct `devices`, "
            "or start the workers that have them (tfdist run --chief --workers N)."
        )
    return resolved


def compare_cpus_of_columns(columns: Sequence[Sequence[str]]) -> None:
    """Leaves XLA to the users if columns have CPUs with different instructions, and their weights would differ.

    XLA decodes and sums large compressed gradients in each column.
    """
    tasks: dict[tuple[str | None, int | None], str] = {}
    for device in (device for column in columns for device in column):
        spec = tf.DeviceSpec.from_string(device)
        tasks.setdefault((spec.job, spec.task), spec.replace(device_type="CPU", device_index=0).to_string())
    if len(columns) == 1 or len(tasks) == 1:
        return
    numbers = {task: cpu_instructions_of(host) for task, host in tasks.items()}
    first = next(iter(numbers.values()))
    if other_tasks := [task or 0 for (_, task), number in numbers.items() if number != first]:
        leave_xla_to_users(other_tasks)


_connected: tuple[cluster.ClusterSpec, ServerMonitor] | None = None


def connect_to_workers(start_timeout_seconds: float) -> ServerMonitor | None:
    """Connects the chief to its workers. In the process of a worker it serves until the chief has ended, then exits.

    Returns:
        What notices that a worker is lost; None if the environment describes no cluster, or one of this process alone.

    Raises:
        ValueError: The cluster is not one of a chief and its workers.
        TimeoutError: Workers did not start in time; the message names them.
    """
    global _connected
    config = cluster.detect()
    if config is None or sum(map(len, config.cluster.jobs.values())) == 1:
        return None
    jobs = config.cluster.jobs
    if set(jobs) != {"chief", "worker"} or len(jobs["chief"]) != 1:
        raise ValueError(
            "There is no cluster with a chief for the stages of a model. Received: a cluster of "
            f"{ {job: len(tasks) for job, tasks in sorted(jobs.items())} }, the number of tasks of each job. Expected: "
            "one chief, which runs the script, and workers, which hold the stages. Start the script by tfdist run "
            "--chief --workers N script.py, or correct TF_CONFIG."
        )
    if config.task.type == "worker":
        serve(jobs, config.task.type, config.task.index)
        sys.exit(0)
    if _connected is None or _connected[0] != config.cluster:
        wait_for_servers(jobs, start_timeout_seconds)
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec({job: list(addresses) for job, addresses in jobs.items()}), "chief", 0, protocol="grpc"
        )
        _connected = config.cluster, ServerMonitor("worker", jobs["worker"])
    return _connected[1]


def default_devices() -> list[str]:
    """Returns the devices of all workers in their order, or without a cluster those of this process.

    Of each process these are its GPUs; without GPUs, its CPU devices.
    """
    devices = [(tf.DeviceSpec.from_string(device.name), device) for device in tf.config.list_logical_devices()]
    is_connected = any(spec.job == "worker" for spec, _ in devices)
    by_task: dict[int, dict[str, list[str]]] = {}
    for spec, device in devices:
        if spec.job == "worker" or not is_connected:
            by_task.setdefault(spec.task or 0, {}).setdefault(device.device_type, []).append(device.name)
    return [name for _, names in sorted(by_task.items()) for name in names.get("GPU") or names.get("CPU", [])]


def _explain(strategy: Any, error: BaseException) -> None:
    if not isinstance(error, tf.errors.OpError):
        return
    if strategy.servers:
        strategy.servers.explain(error)
    if isinstance(error, tf.errors.CancelledError):
        raise _failed_stage(error) from error


def _is_recomputed() -> bool | None:
    loss = current_stage_loss()
    if isinstance(loss, MicroBatchLoss):
        if not loss.recomputes:
            _warn_not_recomputed()
        return loss.recomputes
    return False if loss is not None or hooks_of(tf.distribute.get_strategy()) is HOOKS else None


@functools.cache
def _warn_not_recomputed() -> None:
    warnings.warn(
        "Rematerialized layers keep their intermediate results in stages with a layout map. Received: layers under "
        "`keras.RematScope`, or functions of `keras.remat`, with `layout_map`. Expected: stages without a layout map, "
        "which compute them again in the backward pass. The numbers are equal; use more stages or micro-batches if the "
        "memory does not suffice.",
        stacklevel=2,
    )


def _failed_stage(error: tf.errors.CancelledError) -> tf.errors.CancelledError:
    """Returns the error of a step in which another operation failed than TensorFlow reports."""
    return tf.errors.CancelledError(
        None,
        None,
        "An operation of a stage has failed, and TensorFlow reports only another one that waited for it. Received: "
        f"{str(error.message).strip().splitlines()[-1]!r}. Expected: a batch that all layers can compute; an id beyond "
        'the rows of an embedding is a frequent cause. The log names the operation, in the first line with "aborting '
        'with status", unless TF_CPP_MIN_LOG_LEVEL is above 1. So does `model.predict` on this batch without the '
        "strategy.",
    )


HOOKS = StrategyHooks(
    current_step=current_stage_loss,
    is_recomputed=_is_recomputed,
    are_weights_apart=lambda strategy: True,
    on_error=_explain,
    create=lambda strategy, new: strategy._create_in_parts(new) if strategy._create_in_parts else None,
)
