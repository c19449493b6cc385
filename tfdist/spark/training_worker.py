"""What each worker of `KerasEstimator.fit` does: build and compile the model, train, write the model's file."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.data import PartitionedData
from tfdist.spark.model_columns import InputSpec, combined, input_specs, ordered_outputs
from tfdist.spark.portable_objects import ModelFile, loaded_model, model_content, restored
from tfdist.utils import atomic_files

MODEL_FILE = "model.keras"


@dataclasses.dataclass(frozen=True)
class TrainingTask:
    """What to train, on what, and how."""

    model: Callable[..., Any] | ModelFile  # a function that returns a model, or the file of a model
    model_kwargs: Mapping[str, Any]  # keyword arguments of the function
    compile_args: Mapping[str, Any]  # arguments of `Model.compile`, portable; empty: the model is compiled already
    custom_objects: Mapping[str, Any]  # classes and functions by the names that they have in the model's file
    callbacks: Sequence[Any] | Callable[[], Sequence[Any]]  # Keras callbacks, or a function that returns them
    train: PartitionedData  # the rows to train on
    validation: PartitionedData | None  # the rows to validate with, or None
    feature_cols: Sequence[str]  # the columns of the features
    label_cols: Sequence[str]  # the columns of the labels
    sample_weight_col: str | None  # the column of the sample weights, or None
    batch_size: int  # rows of an update, over all workers
    val_batch_size: int  # rows of a step of the validation, over all workers
    epochs: int
    shuffle: bool  # whether rows come in another order in each epoch
    seed: int  # the seed of Keras, NumPy and Python
    verbose: int  # the argument of `Model.fit` on the first worker
    compression: Any  # the argument of the strategy
    checkpoint_every_steps: int | None  # number of steps between two checkpoints; None: a checkpoint after each epoch
    directory: str  # the directory of this run; all workers and the driver see it


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """What the first worker returns."""

    epoch: list[int]  # the numbers of the epochs
    history: dict[str, list[float]]  # losses and metrics of the epochs
    output_shapes: list[tuple[int | None, ...]]  # the shapes of the outputs for one row


def train_worker(task: TrainingTask) -> TrainingResult | None:
    """Trains on this worker. The first worker writes the model's file and returns the result, others None."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras

    from tfdist.callbacks import FailureRecovery
    from tfdist.strategies import MultiWorkerMirroredStrategy

    strategy = MultiWorkerMirroredStrategy(compression=task.compression)
    keras.utils.set_random_seed(task.seed)
    with strategy.scope():
        model = _compiled_model(task)
        callbacks = [*(task.callbacks() if callable(task.callbacks) else task.callbacks)]
    specs = input_specs(model, task.feature_cols)
    outputs = _number_of_outputs(model, task.label_cols)
    recovery = FailureRecovery(
        Path(task.directory) / "checkpoints",
        every_steps=task.checkpoint_every_steps,
        every_epochs=None if task.checkpoint_every_steps else 1,
    )
    dataset = _dataset(task, task.train, specs, outputs, task.batch_size, shuffle=task.shuffle)
    validation = task.validation and _dataset(task, task.validation, specs, outputs, task.val_batch_size)
    fitted = model.fit(
        dataset,
        validation_data=validation,
        epochs=task.epochs,
        shuffle=False,  # the data is
        callbacks=[*callbacks, recovery],
        verbose=task.verbose if strategy.rank == 0 else 0,
    )
    if strategy.rank != 0:
        return None
    content = model_content(model)
    shapes = _output_shapes(content, task, dataset)
    with atomic_files.replacing(Path(task.directory) / MODEL_FILE) as file:
        file.write(content)
    history = {name: [float(value) for value in values] for name, values in fitted.history.items()}
    return TrainingResult(list(fitted.epoch), history, shapes)


def _compiled_model(task: TrainingTask) -> Any:
    if isinstance(task.model, ModelFile):
        model = restored(task.model, task.custom_objects)
    else:
        model = task.model(**task.model_kwargs)
    if task.compile_args:
        arguments = restored(task.compile_args, task.custom_objects)
        if "optimizer" not in arguments and getattr(model, "optimizer", None) is not None:
            arguments["optimizer"] = model.optimizer
        model.compile(**arguments)
    elif not getattr(model, "compiled", False):
        raise ValueError(
            "The model is not compiled. Received: a model without a loss, and no `loss`. Expected: one of them. Call "
            "`model.compile` in `model_fn`, or give KerasEstimator(loss=..., optimizer=...)."
        )
    return model


def _number_of_outputs(model: Any, label_cols: Sequence[str]) -> int:
    # A subclassed model has no declared outputs, and one that was not built raises an error.
    outputs = list(getattr(model, "outputs", None) or []) if getattr(model, "built", True) else []
    if len(outputs) > 1 and (len(outputs) != len(label_cols) or isinstance(model.output, Mapping)):
        raise ValueError(
            f"The outputs of the model do not fit the columns. Received: label_cols={list(label_cols)} for "
            f"{len(outputs)} outputs{' in a dictionary' if isinstance(model.output, Mapping) else ''}. Expected: one "
            "column for each output, in the same order, and a model that returns a list. Give another `label_cols`, or "
            "return `keras.Model(inputs, [first, second])`."
        )
    return max(len(outputs), 1)


def _dataset(
    task: TrainingTask,
    data: PartitionedData,
    specs: Sequence[InputSpec],
    outputs: int,
    batch_size: int,
    *,
    shuffle: bool = False,
) -> Any:
    labels = list(task.label_cols)
    types = {name: spec.dtype for spec in specs for name in spec.columns if spec.dtype}
    is_list = {field.name: "list" in str(field.type) for field in data.schema}
    shapes = {name: spec.shape for spec in specs for name in spec.columns if spec.shape and is_list[name]}
    dataset = data.dataset(
        batch_size,
        features={str(index): list(spec.columns) for index, spec in enumerate(specs)},
        label={name: name for name in labels} if outputs > 1 else {"0": labels},
        weight=task.sample_weight_col,
        shuffle=shuffle,
        seed=task.seed,
        dtypes=types,
        shapes=shapes,
    )

    def elements(features: Any, targets: Any, *weights: Any) -> Any:
        inputs = combined([features[str(index)] for index in range(len(specs))])
        return (inputs, tuple(targets[name] for name in labels) if outputs > 1 else targets["0"], *weights)

    return dataset.map(elements)


def _output_shapes(content: bytes, task: TrainingTask, dataset: Any) -> list[tuple[int | None, ...]]:
    """Returns the shapes of the outputs of the model in the file. This shows, too, that the file can be loaded."""
    import tensorflow as tf

    model = loaded_model(content, task.custom_objects, compile=False)
    rows = tf.nest.map_structure(lambda spec: tf.zeros([1, *spec.shape[1:]], spec.dtype), dataset.element_spec[0])
    outputs = ordered_outputs(model(rows, training=False), task.label_cols)
    return [tuple(output.shape[1:]) for output in outputs]
