"""KerasEstimator: an estimator of Spark ML that trains a Keras model on several workers, and the directory of a run."""

import inspect
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark import keyword_only
from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from tfdist.data import PartitionedData, from_parquet, from_spark
from tfdist.launch import WorkerError, on_spark
from tfdist.spark.estimator_params import TrainingParams
from tfdist.spark.keras_model import KerasModel
from tfdist.spark.model_columns import check_columns, fingerprint, split
from tfdist.spark.portable_objects import ModelFile, load_params, portable, save_params, stable_text
from tfdist.spark.training_worker import MODEL_FILE, TrainingResult, TrainingTask, train_worker
from tfdist.utils import atomic_files
from tfdist.utils.argument_checks import check_whole_number

_GRACE_SECONDS = 5.0
_COMPILE_ARGS = ("optimizer", "loss", "loss_weights", "metrics")
# What a resumed run has in common with the one that it resumes; it may have more epochs and other workers.
_SAME_IN_A_RUN = (
    "feature_cols label_cols sample_weight_col validation batch_size val_batch_size shuffle random_seed model_kwargs"
).split()

# What the task of a worker is given as it is.
_TASK_PARAMS = (
    "feature_cols label_cols sample_weight_col batch_size epochs shuffle verbose compression checkpoint_every_steps"
).split()


class KerasEstimator(Estimator, TrainingParams, MLWritable, MLReadable):
    """Trains a Keras model on the rows of a DataFrame, on several workers beside the executors of Spark.

    `fit` writes the rows as Parquet into the store, from which each worker reads its own, calls `on_spark`, and returns
    a `KerasModel`, whose `transform` adds predictions. The workers train with
    `tfdist.strategies.MultiWorkerMirroredStrategy`: an update is that of one process with the same global batch.
    `FailureRecovery` saves into the store; with `max_restarts` a training whose worker or executor is lost resumes.

    It is a stage of a `Pipeline`, and parameters can be searched by `CrossValidator`: `epochs`, `batch_size`, or
    arguments of the model by `model_kwargs`. All calls need as many free slots as there are workers.

    The model comes from `model_fn`, which each worker calls in the strategy's scope, or is a copy of `model`. It is
    compiled, or `loss`, `optimizer` and `metrics` are given here. One column of features belongs to each input of the
    model, in the same order, or by names if both have the same; a model with one input gets several columns side by
    side. So do the columns of labels and the outputs. Vectors of MLlib are accepted, and arrays whose rows have as many
    values as the input of the model.

    With a `run_id` the directory of the run stays in the store. If the driver was lost, the same `fit` resumes; for
    more `epochs` it continues. Without one all files are removed when `fit` returns or fails.

    `save` writes plain parameters as JSON, and functions and objects by cloudpickle: load only what you trust.

    >>> from tfdist.spark import KerasEstimator
    >>> estimator = KerasEstimator(model_fn=build, store="/shared/runs", workers=4)  # doctest: +SKIP
    >>> predictions = estimator.fit(train_df).transform(test_df)  # doctest: +SKIP
    """

    _input_kwargs: dict[str, Any]  # set by keyword_only

    @keyword_only
    def __init__(
        self,
        *,
        model_fn: Callable[..., Any] | None = None,
        model: Any = None,
        model_kwargs: Mapping[str, Any] | None = None,
        optimizer: Any = None,
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        custom_objects: Mapping[str, Any] | None = None,
        callbacks: Sequence[Any] | Callable[[], Sequence[Any]] | None = None,
        feature_cols: str | Sequence[str] = "features",
        label_cols: str | Sequence[str] = "label",
        sample_weight_col: str | None = None,
        validation: float | str | None = None,
        batch_size: int = 32,
        val_batch_size: int | None = None,
        epochs: int = 1,
        shuffle: bool = True,
        random_seed: int | None = None,
        verbose: int = 2,
        compression: Any = None,
        workers: int = 2,
        threads_per_worker: int | None = None,
        max_restarts: int = 0,
        start_timeout_seconds: float = 300.0,
        checkpoint_every_steps: int | None = None,
        store: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        output_cols: str | Sequence[str] | None = None,
        output_types: str | Sequence[str] | None = None,
        predict_batch_size: int = 256,
    ) -> None:
        """Sets the parameters; `setParams` and `copy` change them.

        Args:
            model_fn: A function that returns a Keras model, called in each worker.
            model: A Keras model, instead of a function. Its weights are the first ones.
            model_kwargs: Keyword arguments of `model_fn`.
            optimizer: The argument of `compile`, as `loss`, `loss_weights` and `metrics`: names, functions or objects
                of Keras.
            loss: The argument of `compile`. None: the model is compiled.
            loss_weights: The argument of `compile`.
            metrics: The argument of `compile`.
            custom_objects: The model's classes and functions by their names, if they are not of Keras.
            callbacks: Keras callbacks, or a function that returns them, called in each worker.
            feature_cols: The columns of the features.
            label_cols: The columns of the labels.
            sample_weight_col: The column of the sample weights.
            validation: A fraction of the rows, or the name of a column that is true in rows of the validation.
            batch_size: Rows of an update, over all workers; in Horovod it is that of each worker.
            val_batch_size: Rows of a step of the validation; by default `batch_size`.
            epochs: Number of epochs.
            shuffle: Whether rows come in another order in each epoch.
            random_seed: The seed of the weights, the shuffles, and the split of the validation. By default another one
                each time; a run with a `run_id` has 0.
            verbose: The argument of `Model.fit` on the first worker; the lines are in its executor's log.
            compression: The compression of gradients: a name or an object of `tfdist.compression`.
            workers: Number of workers, each in a slot of Spark.
            threads_per_worker: Threads of each worker. Defaults to `spark.task.cpus`.
            max_restarts: How often to restart all workers after a failure.
            start_timeout_seconds: How long to wait for free slots, and then for the workers to start.
            checkpoint_every_steps: Number of steps between two checkpoints. By default one checkpoint after each epoch.
            store: A directory that the driver and all executors see under the same path.
            run_id: The name of the run, to resume it.
            output_cols: The columns of the predictions: by default "prediction", or "prediction_<label>" for several.
            output_types: The types of these: see `KerasModel`.
            predict_batch_size: Rows of a batch of predictions.
        """
        super().__init__()
        parameters = inspect.signature(KerasEstimator.__init__).parameters.values()
        self._setDefault(**{each.name: each.default for each in parameters if each.default not in (None, each.empty)})
        self._set(**{name: value for name, value in self._input_kwargs.items() if value is not None})

    def setParams(self, **params: Any) -> "KerasEstimator":
        """Sets parameters by their names."""
        return self._set(**params)

    def write(self) -> MLWriter:
        """Returns a writer, for `write().overwrite().save(path)`."""
        return _EstimatorWriter(self)

    @classmethod
    def read(cls) -> MLReader:
        """Returns a reader, for `read().load(path)`."""
        return _EstimatorReader()

    def _fit(self, dataset: Any) -> KerasModel:
        store = store_path(self._given("store"))
        source = self._model_source()
        for name, at_least in (("workers", 1), ("batch_size", 1), ("epochs", 1), ("max_restarts", 0)):
            check_whole_number(name, self._given(name), at_least=at_least)
        features, labels, weight = (self._given(name) for name in ("feature_cols", "label_cols", "sample_weight_col"))
        check_columns(dataset, features, "feature_cols")
        check_columns(dataset, labels, "label_cols")
        check_columns(dataset, [weight] if weight else [], "sample_weight_col")
        columns = list(dict.fromkeys([*features, *labels, *([weight] if weight else [])]))
        run = RunDirectory(store, self._given("run_id"))
        seed = self._given("random_seed")
        if seed is None:
            seed = 0 if run.has_name else secrets.randbelow(2**31)
        parts = split(dataset, self._given("validation"), columns, seed)
        same = json.dumps({name: self._given(name) for name in _SAME_IN_A_RUN}, default=stable_text)
        try:
            train, validation = run.data(
                *parts, lambda: "-".join(fingerprint(df, same) for df in parts if df is not None)
            )
            task = TrainingTask(
                model=source,
                model_kwargs=self._given("model_kwargs") or {},
                compile_args={n: portable(self._given(n)) for n in _COMPILE_ARGS if self._given(n) is not None},
                custom_objects=self._given("custom_objects") or {},
                callbacks=self._given("callbacks") or [],
                train=train,
                validation=validation,
                val_batch_size=self._given("val_batch_size") or self._given("batch_size"),
                seed=seed,
                directory=str(run.path),
                **{name: self._given(name) for name in _TASK_PARAMS},
            )
            result = on_spark(
                train_worker,
                task,
                spark=dataset.sparkSession,
                workers=self._given("workers"),
                threads_per_worker=self._given("threads_per_worker"),
                max_restarts=self._given("max_restarts"),
                start_timeout_seconds=self._given("start_timeout_seconds"),
                grace_seconds=_GRACE_SECONDS,
            )[0]
            return self._trained(result, (Path(run.path) / MODEL_FILE).read_bytes())
        except (KeyboardInterrupt, WorkerError) as error:
            if not run.has_name and getattr(error, "rank", None) is None:
                time.sleep(_GRACE_SECONDS)  # workers that were interrupted may save until then
            raise
        finally:
            run.remove()

    def _trained(self, result: TrainingResult | None, content: bytes) -> KerasModel:
        if result is None:
            raise RuntimeError("The first worker has returned nothing. Received: None. Expected: a TrainingResult.")
        model = KerasModel(
            content,
            output_shapes=result.output_shapes,
            history=result.history,
            epoch=result.epoch,
            custom_objects=self._given("custom_objects"),
        )
        model._resetUid(self.uid)
        return self._copyValues(model)

    def _model_source(self) -> Any:
        function, model = self._given("model_fn"), self._given("model")
        if (function is None) == (model is None) or (function is not None and not callable(function)):
            raise ValueError(
                f"There has to be one source of the model. Received: model_fn={function!r} and model={model!r}. "
                "Expected: a function that returns a model, or a Keras model. Give KerasEstimator(model_fn=build), "
                "without calling the function."
            )
        source = function if model is None else portable(model)
        if model is not None and not isinstance(source, ModelFile):
            raise TypeError(
                f"`model` is not a Keras model. Received: {type(model).__name__}. Expected: a `keras.Model`. Give a "
                "function as `model_fn`."
            )
        return source

    def _given(self, name: str) -> Any:
        """Returns the value of a parameter, or None."""
        param = self.getParam(name)
        return self.getOrDefault(param) if self.isDefined(param) else None


class _EstimatorWriter(MLWriter):
    def __init__(self, instance: KerasEstimator) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        save_params(self._instance, path, self.sparkSession, {})


class _EstimatorReader(MLReader):
    def load(self, path: str) -> KerasEstimator:
        instance = KerasEstimator()
        load_params(instance, path, self.sparkSession)
        return instance


_DESCRIPTION = "run.json"


def store_path(store: str | None) -> Path:
    """Returns the directory of a store, created if missing."""
    path = (store or "").removeprefix("file://")
    if not path or "://" in path:
        raise ValueError(
            f"There is no store that the workers can share. Received: store={store!r}. Expected: a directory that "
            "the driver and all executors see under the same path, as of NFS or a mounted object store. Give "
            "KerasEstimator(store='/shared/runs'), where the data and checkpoints of a training are."
        )
    Path(path).mkdir(parents=True, exist_ok=True)
    return Path(os.path.abspath(path))


class RunDirectory:
    """The directory of one training.

    A run with a name stays, and resumes if the same training is started again. Others are removed at the end.
    """

    def __init__(self, store: Path, run_id: str | None) -> None:
        if run_id is not None and Path(run_id).name != run_id:
            raise ValueError(
                f"Invalid `run_id`. Received: run_id={run_id!r}. Expected: a name that a directory can have, without "
                "slashes. Choose another one."
            )
        self._run_id, self.has_name = run_id, run_id is not None
        # The prefix keeps other directories of the store from being taken for an incomplete run, and removed.
        self.path = store / f"tfdist-run-{run_id or secrets.token_hex(8)}"

    def data(self, train: Any, validation: Any, fingerprint: Callable[[], str]) -> tuple[PartitionedData, Any]:
        """Writes the rows, or finds those of the same run, and returns the data to train on and to validate with.

        `fingerprint` computes what a run with the same name must have in common with this one.
        """
        parts = {"train": train} | ({} if validation is None else {"validation": validation})
        description = {"fingerprint": fingerprint() if self.has_name else "", "parts": sorted(parts)}
        file = self.path / _DESCRIPTION
        if file.exists():
            if json.loads(file.read_bytes()) != description:
                raise ValueError(
                    f"The store has another run of this name. Received: run_id={self._run_id!r} for other rows, "
                    "columns or parameters than those that it has begun with. Expected: the same, to resume it. "
                    f"Choose another `run_id`, or remove {self.path}."
                )
            datasets = {name: from_parquet(self.path / name) for name in parts}
        else:
            shutil.rmtree(self.path, ignore_errors=True)
            datasets = {name: from_spark(part, store=self.path / name, keep=True) for name, part in parts.items()}
            with atomic_files.replacing(file) as opened:
                opened.write(json.dumps(description).encode())
        for name, data in datasets.items():
            if not data.num_rows:
                raise ValueError(
                    f"There are no rows to {'train on' if name == 'train' else 'validate with'}. Received: 0 rows. "
                    "Expected: at least one. Check the DataFrame and `validation`."
                )
        return datasets["train"], datasets.get("validation")

    def remove(self) -> None:
        """Removes the directory, unless the run has a name."""
        if not self.has_name:
            shutil.rmtree(self.path, ignore_errors=True)
