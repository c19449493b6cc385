"""A stage as one function without side effects, which a step calls once for each micro-batch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.keras_internals.compiled_loss import has_compiled_loss, loss_parts, overrides_compute_loss
from tfdist.keras_internals.keras_symbols import get_mask, set_mask
from tfdist.keras_internals.layer_calls import initial_scope
from tfdist.losses.pruned_function import OF_SHAPES, needed_operations
from tfdist.pipeline.micro_batch_loss import MicroBatchLoss, divisors_of
from tfdist.pipeline.stages import ModelStages, Stage

_LOOKUPS = ("Gather", "GatherV2")
_SAME_ROWS = ("Cast", "Identity")


class StageInputs(NamedTuple):
    """What a stage takes for a micro-batch.

    Attributes:
        values: Of the stage's variables, in their order.
        tensors: The stage's inputs, in their order.
        masks: For each input its mask or None; the same ones for all micro-batches.
        data: On the last stage inputs, targets and weights of the micro-batch; otherwise None.
        fraction: The samples of the micro-batch divided by those of the batch, a float32 scalar.
        is_real: 1, or 0 if it has no samples and computes on those of another micro-batch; a float32 scalar.
        divisors: Those of the losses of the batch, a float32 vector.
    """

    values: list[tf.Tensor]
    tensors: list[tf.Tensor]
    masks: list[tf.Tensor | None]
    data: Any
    fraction: tf.Tensor
    is_real: tf.Tensor
    divisors: tf.Tensor


class StageResult(NamedTuple):
    """What a stage returns for a micro-batch.

    Attributes:
        tensors: The stage's outputs, in their order.
        masks: For each output its mask or None.
        loss: The part of the loss of the batch, a float32 scalar; None if the stage has no loss.
        of_outputs: On the last stage, the parts of the losses of the outputs, if there are several.
        states: The new values of the variables that the stage changes.
        choices: For outputs that are split over devices, the indices that accuracies take.
    """

    tensors: list[tf.Tensor]
    masks: list[tf.Tensor | None]
    loss: tf.Tensor | None
    of_outputs: list[tf.Tensor]
    states: list[tf.Tensor]
    choices: list[tf.Tensor]


@dataclass(frozen=True)
class StageKind:
    """Which function of a stage is traced.

    Attributes:
        training: Whether layers compute as in training.
        has_loss: Whether losses are computed.
        is_even: Whether all micro-batches have the same number of samples, known while tracing.
    """

    training: bool
    has_loss: bool
    is_even: bool = True


class StageFunction:
    """A stage, traced once.

    TensorFlow calls the function and its gradient, instead of copying them into the graph of a step for each
    micro-batch. It takes the values of variables as arguments, so that calls on different stages are independent.

    Attributes:
        stage: The stage.
        weights: The positions of the variables whose gradients the backward pass returns.
        inputs: The positions of the inputs whose gradients it returns after those: earlier stages want them.
        changed: The variables whose new values are the result's `states`.
        num_divisors: How many divisors of the batch its losses use.
        fixed_tables: The positions of variables of which each micro-batch looks up the same rows.
        recomputes: Whether its backward pass computes rematerialized functions again.
    """

    recomputes = True

    def __init__(self, model: Any, stages: ModelStages, stage: Stage, kind: StageKind, example: StageInputs) -> None:
        """Traces the function for arguments like `example`."""
        self.changed: Sequence[keras.Variable] = ()
        self.num_divisors = 0
        self.fixed_tables: set[int] = set()
        self._model, self._stages, self.stage, self._kind = model, stages, stage, kind
        trained = {id(variable) for variable in model.trainable_variables} if kind.training else set()
        self.weights = [position for position, variable in enumerate(stage.variables) if id(variable) in trained]
        self.inputs = [
            position
            for position, (symbolic, tensor) in enumerate(zip(stage.inputs, example.tensors, strict=True))
            if trained and is_differentiable(tensor) and stages.maker(symbolic) >= 0
        ]
        self._function = self._traced(_specs(stages, stage, example, kind))
        _check_captures(self._function, stage)

    def forward(
        self, arguments: Sequence[StageInputs], devices: Sequence[str], after: Sequence[list[tf.Operation]], rows: Any
    ) -> tuple[Sequence[StageResult], Any]:
        """Adds the forward pass of a micro-batch; returns by device the results, and what the backward pass needs.

        `arguments`, `devices` (here one) and the operations `after` which it begins are by device; `rows` is the number
        of samples, if it is not static.
        """
        [inputs], [device] = arguments, devices
        sources = self._sources(inputs)
        with tf.device(device), tf.control_dependencies(after[0]):
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(sources)
                result = self._function(inputs)
        return [result], (tape, sources, result, device)

    def complete_result(self, results: Sequence[StageResult], device: str, rows: Any) -> StageResult:
        """Returns the result of the first device, whose outputs are complete, as metrics and the program take them."""
        return results[0]

    @property
    def accuracies(self) -> Sequence[Any]:
        """Metrics that take `StageResult.choices` as outputs."""
        return ()

    def backward(
        self, to_differentiate: Any, seeds: Sequence[Sequence[Any]], after: Sequence[list[tf.Operation]]
    ) -> list[list[Any]]:
        """Adds the backward pass of a micro-batch, for what `forward` has returned to differentiate, to the graph.

        The `seeds` are by device the gradients of the outputs and of the stage's loss; None without one. Returns by
        device the gradients of `weights` and `inputs`, dense, `tf.IndexedSlices` or None; none at all if nothing is
        differentiated.
        """
        tape, sources, result, device = to_differentiate
        pairs = zip([*result.tensors, result.loss], seeds[0], strict=True)
        targets = [(target, seed) for target, seed in pairs if seed is not None]
        if not targets or not sources:
            return [[]]
        with tf.device(device), tf.control_dependencies(after[0]):
            return [tape.gradient([target for target, _ in targets], sources, [seed for _, seed in targets])]

    def _sources(self, arguments: StageInputs) -> list[tf.Tensor]:
        """Returns what a stage is differentiated by."""
        weights = [arguments.values[position] for position in self.weights]
        return [*weights, *(arguments.tensors[position] for position in self.inputs)]

    def _traced(self, specs: StageInputs) -> Any:
        """Returns the traced function, which has a `graph`."""
        traced = tf.function(self._run, autograph=False, experimental_attributes={"_noinline": True})
        with tf.init_scope(), tf.device(None):
            function = traced.get_concrete_function(specs)
        self.fixed_tables = tables_of_fixed_rows(function, len(self.stage.variables))
        return function

    def _run(self, arguments: StageInputs) -> StageResult:
        stage = self.stage
        samples = _samples(self._stages, stage, arguments)
        loss = MicroBatchLoss(arguments.fraction, arguments.is_real, samples[0], arguments.divisors)
        loss.recomputes = self.recomputes
        scope = initial_scope(stage.variables, arguments.values)
        before = {id(variable): scope.get_current_value(variable) for variable in stage.variables}
        with loss.running(samples[1]), scope:
            values = self._computed(arguments)
            of_layers = [tf.reduce_sum(loss.as_part(added, is_mean=True)) for added in scope.losses]
            parts = [tf.cast(added, tf.float32) for added in of_layers]
            _check_divisors(loss, stage)
            _check_added_losses(self._model, stage, parts)
            of_outputs: list[tf.Tensor] = []
            if arguments.data is not None and self._kind.has_loss and has_compiled_loss(self._model):
                compiled, of_outputs = self._compiled_loss(loss, arguments.data, values)
                parts.append(compiled)
        self.num_divisors = loss.num_divisors
        after = {id(variable): scope.get_current_value(variable) for variable in stage.variables}
        self.changed = [variable for variable in stage.variables if after[id(variable)] is not before[id(variable)]]
        _check_updates(scope, stage)
        return StageResult(
            tensors=[tf.convert_to_tensor(values[id(tensor)]) for tensor in stage.outputs],
            masks=[get_mask(values[id(tensor)]) for tensor in stage.outputs],
            loss=tf.add_n(parts) if parts and self._kind.has_loss else None,
            of_outputs=of_outputs,
            states=[tf.where(arguments.is_real > 0, after[key], before[key]) for key in map(id, self.changed)],
            choices=self._choices(values),
        )

    def _choices(self, values: dict[int, Any]) -> list[tf.Tensor]:
        """Returns `StageResult.choices`."""
        return []

    def _received(self, arguments: StageInputs) -> dict[int, Any]:
        """Returns the inputs of the stage with their masks, by the ids of the symbolic tensors."""
        values: dict[int, Any] = {}
        for symbolic, tensor, mask in zip(self.stage.inputs, arguments.tensors, arguments.masks, strict=True):
            values[id(symbolic)] = tf.identity(tensor)
            if mask is not None:
                set_mask(values[id(symbolic)], mask)
        return values

    def _computed(self, arguments: StageInputs) -> dict[int, Any]:
        """Returns the inputs and all results of the layer calls, by the ids of the symbolic tensors."""
        values = self._received(arguments)
        for call in self.stage.calls:
            results = call(values, training=self._kind.training)
            values |= {id(symbolic): result for symbolic, result in zip(call.outputs, results, strict=True)}
        return values

    def _compiled_loss(self, step: MicroBatchLoss, data: Any, values: dict[int, Any]) -> tuple[Any, list[Any]]:
        x, y, sample_weight = data
        graph = self._stages.graph
        y_pred = graph.packed_outputs([values[id(tensor)] for tensor in graph.outputs])
        loss, of_outputs = loss_parts(self._model, step, x, y, y_pred, sample_weight, training=self._kind.training)
        if loss.shape.rank != 0:
            raise ValueError(
                f"The loss of a batch is not a scalar. Received: a loss of shape {tuple(loss.shape)}. Expected: a "
                "scalar. Give the losses of `compile` a `reduction` other than None."
            )
        return tf.cast(loss, tf.float32), of_outputs


@dataclass(eq=False)
class StepFunctions:
    """The functions of all `stages`. Each is traced when the first micro-batch reaches its stage.

    See `divisors_of` for `batch`. The divisors are on the chief. `trace` creates a function, as `StageFunction` does.
    """

    model: Any
    stages: ModelStages
    kind: StageKind
    batch: Any
    chief: str
    trace: Callable[..., StageFunction]
    _functions: dict[int, Any] = field(default_factory=dict)
    _divisors: tf.Tensor | None = None

    def of(self, index: int, arguments: StageInputs) -> tuple[Any, StageInputs]:
        """Returns the function of a stage, and its arguments `arguments` with the divisors of the losses."""
        function = self._functions.get(index)
        if function is None:
            function = self.trace(self.model, self.stages, self.stages.stages[index], self.kind, arguments)
            self._functions[index] = function
            if function.num_divisors:
                with tf.control_dependencies(None), tf.device(self.chief):
                    number = function.num_divisors
                    self._divisors = divisors_of(
                        self.model, self.stages.graph, self.batch, number, training=self.kind.training
                    )
        return function, arguments._replace(divisors=self._divisors) if function.num_divisors else arguments


def is_differentiable(tensor: Any) -> bool:
    """Whether a tensor may have a gradient."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _samples(stages: ModelStages, stage: Stage, arguments: StageInputs) -> tuple[Any, list[tf.Tensor]]:
    """Returns the number of rows of the micro-batch, and the tensors whose first axis holds the samples."""
    inputs = [
        tensor for symbolic, tensor in zip(stage.inputs, arguments.tensors, strict=True) if stages.has_samples(symbolic)
    ]
    masks = [mask for mask in arguments.masks if mask is not None]
    data = [leaf for leaf in tf.nest.flatten(arguments.data) if leaf is not None and leaf.shape.rank]
    tensors = [*inputs, *masks, *data]
    static = tensors[0].shape[0]
    return tf.shape(tensors[0])[0] if static is None else static, tensors


def _specs(stages: ModelStages, stage: Stage, example: StageInputs, kind: StageKind) -> StageInputs:
    """Returns the specs of the arguments of all micro-batches, of which `example` is one."""

    def spec(leaf: Any, *, has_rows: bool = False) -> Any:
        if leaf is None:
            return None
        return tf.TensorSpec([None, *leaf.shape[1:]] if has_rows and not kind.is_even else leaf.shape, leaf.dtype)

    return StageInputs(
        values=[spec(value) for value in example.values],
        tensors=[
            spec(tensor, has_rows=stages.has_samples(symbolic))
            for symbolic, tensor in zip(stage.inputs, example.tensors, strict=True)
        ],
        masks=[spec(mask, has_rows=True) for mask in example.masks],
        data=tf.nest.map_structure(lambda leaf: spec(leaf, has_rows=True), example.data),
        fraction=spec(example.fraction),
        is_real=spec(example.is_real),
        divisors=tf.TensorSpec([None], tf.float32),
    )


def _check_added_losses(model: Any, stage: Stage, losses: list[tf.Tensor]) -> None:
    """Rejects losses of layers if the model computes its loss itself, and may or may not add them."""
    if losses and overrides_compute_loss(model):
        raise ValueError(
            "A model with its own `compute_loss` cannot have layers with losses in stages, because its loss is "
            f"computed on the last stage. Received: {type(model).__name__}.compute_loss and a loss of a layer among "
            f"{', '.join(call.name for call in stage.calls)}. Expected: one of them. Give `compile` a loss instead."
        )


def _check_divisors(loss: MicroBatchLoss, stage: Stage) -> None:
    """Rejects losses of layers that divide by more than the number of samples: those of the batch are not known."""
    if loss.num_divisors:
        raise ValueError(
            f"A layer computes a masked or weighted loss. Received: such a loss in stage {stage.index} "
            f"({', '.join(call.name for call in stage.calls)}). Expected: these losses in `compile`, or losses in "
            "layers that are means over the samples or sums."
        )


def _check_updates(scope: keras.StatelessScope, stage: Stage) -> None:
    """Rejects a stage that assigns variables which are not those of its layers."""
    known = {id(variable) for variable in stage.variables}
    strange = [key for key in scope.state_mapping if key not in known]
    if strange:
        raise ValueError(
            f"Stage {stage.index} assigns variables that do not belong to its layers, such as the state of Keras' "
            f"global random generator. Received: {len(strange)} such variables in the layers "
            f"{', '.join(call.name for call in stage.calls)}. Expected: layers that change their own variables only. "
            "Create a `keras.random.SeedGenerator` in the constructor of each layer that draws random numbers."
        )


def _check_captures(function: Any, stage: Stage) -> None:
    """Rejects a stage that reads variables which are not those of its layers: they would have no gradient."""
    names = [capture.name for capture in function.graph.internal_captures if capture.dtype == tf.resource]
    if names:
        raise ValueError(
            f"Stage {stage.index} reads variables that Keras does not know as those of its layers. Received: "
            f"{', '.join(names)} in the layers {', '.join(call.name for call in stage.calls)}. Expected: variables "
            "made by `add_weight`, or `keras.Variable`s that are attributes of the layers. Tables such as those of "
            "StringLookup and TextVectorization belong into the `map` of a `tf.data.Dataset`."
        )


def tables_of_fixed_rows(traced: Any, tables: int, received: Iterable[str] = ()) -> set[int]:
    """Returns the positions of the tables whose rows do not depend on the values of the other arguments.

    The first `tables` arguments of the `traced` function are tables. The values of operations that are `received` may
    differ in each call, too.
    """
    own = traced.inputs[: len(traced.inputs) - len(traced.captured_inputs)]
    positions = {tensor.op.name: position for position, tensor in enumerate(own[:tables])}
    others = {*(tensor.op.name for tensor in own[tables:]), *received}
    is_fixed: dict[int, bool] = {}
    for operation in traced.graph.get_operations():
        if operation.type in _LOOKUPS and (name := _source(operation.inputs[0])) in positions:
            position = positions[name]
            depends = not others.isdisjoint(needed_operations(operation.inputs[1].op, ends=OF_SHAPES))
            is_fixed[position] = is_fixed.get(position, True) and not depends
    return {position for position, fixed in is_fixed.items() if fixed}


def _source(tensor: tf.Tensor) -> str:
    operation = tensor.op
    while operation.type in _SAME_ROWS:
        operation = operation.inputs[0].op
    return str(operation.name)
