"""Cases about metrics: every stock kind, and what callbacks see after every batch."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases import CLASSES, FEATURES, INPUTS, LABELS, TARGETS, Outcome, case, dataset, fitted

Adam, SGD = keras.optimizers.Adam, keras.optimizers.SGD


@case()
def batch_logs(strategy: tf.distribute.Strategy) -> Outcome:
    """What callbacks see after every batch, also for a metric that is not linear in the samples."""
    seen: list[dict[str, float]] = []
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(dict(logs)))
    fitted(
        strategy,
        lambda: Adam(0.01),
        data=dataset(21),
        metrics=lambda: ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)],
        fit={"callbacks": [watch]},
    )
    return {"logs": [[float(logs[name]) for name in sorted(logs)] for logs in seen]}


def _evaluated_metrics(
    strategy: tf.distribute.Strategy, outputs: int, activation: str, targets: Any, metrics: Any
) -> Outcome:
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(outputs, activation=activation)])
        model.compile(SGD(0.01), loss="mse", metrics=metrics())
    data = dataset(23, INPUTS, targets)
    history = model.fit(data, epochs=1, verbose=0)
    return {"logs": history.history, "evaluation": model.evaluate(data, verbose=0, return_dict=True)}


@case()
def metrics_of_binary_classifiers(strategy: tf.distribute.Strategy) -> Outcome:
    m = keras.metrics
    return _evaluated_metrics(
        strategy,
        1,
        "sigmoid",
        (LABELS[:, np.newaxis] > 1).astype("float32"),
        lambda: [
            m.BinaryAccuracy(), m.BinaryCrossentropy(), m.AUC(), m.AUC(curve="PR", name="pr"), m.Precision(),
            m.Recall(), m.TruePositives(), m.TrueNegatives(), m.FalsePositives(), m.FalseNegatives(),
            m.PrecisionAtRecall(0.5), m.RecallAtPrecision(0.5), m.SensitivityAtSpecificity(0.5),
            m.SpecificityAtSensitivity(0.5), m.Hinge(), m.SquaredHinge(), m.BinaryIoU(target_class_ids=[0, 1]),
            m.F1Score(threshold=0.5), m.FBetaScore(threshold=0.5),
        ],
    )  # fmt: skip


@case()
def metrics_of_classifiers(strategy: tf.distribute.Strategy) -> Outcome:
    m = keras.metrics
    return _evaluated_metrics(
        strategy,
        CLASSES,
        "softmax",
        np.eye(CLASSES, dtype="float32")[LABELS],
        lambda: [
            m.Accuracy(), m.CategoricalAccuracy(), m.TopKCategoricalAccuracy(2), m.CategoricalCrossentropy(),
            m.KLDivergence(), m.Poisson(), m.CategoricalHinge(), m.OneHotIoU(CLASSES, [0, 1]), m.OneHotMeanIoU(CLASSES),
            m.F1Score(average="macro"), m.AUC(multi_label=True, num_labels=CLASSES), m.CosineSimilarity(),
        ],
    )  # fmt: skip


@case()
def metrics_of_sparse_labels(strategy: tf.distribute.Strategy) -> Outcome:
    m = keras.metrics
    return fitted(
        strategy,
        lambda: SGD(0.01),
        data=dataset(23),
        metrics=lambda: [
            m.SparseCategoricalAccuracy(), m.SparseTopKCategoricalAccuracy(2),
            m.SparseCategoricalCrossentropy(from_logits=True), m.MeanIoU(CLASSES, sparse_y_pred=False),
            m.IoU(CLASSES, [0, 2], sparse_y_pred=False),
        ],
    )  # fmt: skip


@case()
def metrics_of_regressors(strategy: tf.distribute.Strategy) -> Outcome:
    m = keras.metrics
    return _evaluated_metrics(
        strategy,
        1,
        "linear",
        TARGETS,
        lambda: [
            m.MeanSquaredError(), m.RootMeanSquaredError(), m.MeanAbsoluteError(), m.MeanAbsolutePercentageError(),
            m.MeanSquaredLogarithmicError(), m.LogCoshError(), m.CosineSimilarity(), m.R2Score(),
        ],
    )  # fmt: skip
