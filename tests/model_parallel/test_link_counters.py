"""What stages send is counted, by link and exactly: compared with a computation by hand, and with the traced graph."""

import json
from collections import defaultdict
from typing import Any

import keras
import layout_models as models
import numpy as np
import pipeline_runs as runs
import pytest
import tensorflow as tf

from tfdist.callbacks import CommunicationReport
from tfdist.collectives import LinkStats
from tfdist.compression import ErrorFeedback, Policy, TopK, WarmUp
from tfdist.pipeline.transfers import DENSE, LinkCounters
from tfdist.strategies import ModelParallelStrategy, Pipeline

layers = keras.layers
pytestmark = pytest.mark.usefixtures("cpus")
CHIEF = 0  # also the first stage of the first column
WIDTH, LENGTH, WORDS = 8, 6, 50


def links(strategy: ModelParallelStrategy, step: str | None = None) -> dict[tuple[int, int], LinkStats]:
    counted = strategy.communication_by_link(step)
    return {(int(source[-1]), int(target[-1])): stats for (source, target), stats in counted.items()}


def rows_of_columns(batches: list[int], columns: int, micro_batches: int) -> list[int]:
    """By column the rows of its micro-batches; one without samples computes on one row."""
    parts = columns * micro_batches
    rows = [0] * columns
    for batch in batches:
        for part in range(parts):
            rows[part // micro_batches] += max(batch * (part + 1) // parts - batch * part // parts, 1)
    return rows


def sums(*parts: dict[tuple[int, int], LinkStats]) -> dict[tuple[int, int], LinkStats]:
    total: dict[tuple[int, int], LinkStats] = defaultdict(LinkStats)
    for part in parts:
        for link, stats in part.items():
            total[link] += stats
    return dict(total)


def mlp_links(stages: int, columns: int, rows: list[int], step: str) -> dict[tuple[int, int], LinkStats]:
    """The links of `runs.mlp`: 12 inputs, 16 units at each cut, 5 outputs, and targets of 8 bytes."""
    found = []
    for column, of_column in enumerate(rows):
        first, last = column * stages, column * stages + stages - 1
        if column:
            found.append({(CHIEF, first): LinkStats(batch_bytes=of_column * 12 * 4)})
            found.append({(last, stages - 1): LinkStats(prediction_bytes=of_column * 5 * 4)})
        for stage in range(first, last):
            found.append({(stage, stage + 1): LinkStats(activation_bytes=of_column * 16 * 4)})
            if step == "train_step":
                found.append({(stage + 1, stage): LinkStats(activation_gradient_bytes=of_column * 16 * 4)})
        if step == "predict_step":
            continue
        # All targets go to the first column, for the metrics.
        for device in {last, stages - 1}:
            found.append({(CHIEF, device): LinkStats(batch_bytes=of_column * 8)})
    return sums(*found)


@pytest.mark.parametrize(("stages", "columns", "micro_batches"), [(3, 1, 2), (2, 2, 2)])
def test_links_of_an_mlp_with_uneven_batches(stages: int, columns: int, micro_batches: int) -> None:
    """Batches of 16, 16, 16 and 2 samples; the last one has fewer samples than 2 x 2 micro-batches."""
    compression = Policy("bf16", dense_below=1) if columns == 2 else None
    strategy = runs.strategy_of(stages, columns, compression, micro_batches=micro_batches)
    with strategy.scope():
        model = runs.made(
            runs.mlp, lambda m: runs.compile_classifier(m, keras.optimizers.Adam(gradient_accumulation_steps=2))
        )
    rows = rows_of_columns([16, 16, 16, 2], columns, micro_batches)
    report = CommunicationReport(print_table=False)
    # With a validation, which the report does not count.
    history = model.fit(
        runs.X, runs.CLASSES, batch_size=16, verbose=0, validation_data=(runs.X, runs.CLASSES), callbacks=[report]
    ).history
    model.predict(runs.X, batch_size=16, verbose=0)
    expected = mlp_links(stages, columns, rows, "train_step")
    parameters = {stage: 0 for stage in range(stages)}
    for variable in model.trainable_variables:
        parameters[int(variable.value.device[-1])] += int(np.prod(variable.shape))
    sent = {stage: elements + elements % 2 for stage, elements in parameters.items()}  # slices of equal length
    exchanged = 2 * 4 * sum(sent.values()) * 2 if columns == 2 else 0  # both ways, in 4 steps, bfloat16
    uncompressed = 2 * 4 * sum(parameters.values()) * 4 if columns == 2 else 0
    for stage, elements in sent.items() if columns == 2 else ():
        sums_of_stage = LinkStats(weight_gradient_bytes=4 * elements * 2)
        expected = sums(expected, {(stage, 2 + stage): sums_of_stage, (2 + stage, stage): sums_of_stage})
    assert links(strategy, "train_step") == expected
    assert links(strategy, "test_step") == mlp_links(stages, columns, rows, "test_step")
    to_caller = {(stages - 1, CHIEF): LinkStats(prediction_bytes=50 * 5 * 4)}
    assert links(strategy, "predict_step") == sums(mlp_links(stages, columns, rows, "predict_step"), to_caller)
    total = strategy.communication
    assert (total.wire_bytes, total.dense_bytes, total.updates) == (exchanged, uncompressed, 2)
    everything = sum((one.total_bytes for one in strategy.communication_by_link().values()), 0)
    assert total.other_bytes + total.wire_bytes == everything
    activations = sum(one.activation_bytes for one in expected.values())
    assert history["activation_bytes"] == history["activation_gradient_bytes"] == [activations / 2]
    assert history["wire_bytes"] == [exchanged / 2]
    table = report.table().splitlines()
    assert "(2 updates)" in table[0] and table[1].split()[:3] == ["link", "batches", "activations"]
    resumed = CommunicationReport()
    resumed.set_model(model)
    resumed.on_train_begin()
    resumed.set_state(json.loads(json.dumps(report.get_state())))
    assert resumed.table().splitlines() == table
    assert sum(line.startswith("CPU:") for line in table) == len(expected)
    assert f"{sum(one.total_bytes for one in expected.values()) / 2 / 1000:.3f}" == table[-1].split()[-1]


def tied_model() -> keras.Model:
    """Three stages: the embedding, two layers with a mask, and a skip with the tied embedding."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    embedding = runs.TiedEmbedding(WORDS, WIDTH, mask_zero=True)
    embedded = embedding(tokens)
    x = layers.Dense(WIDTH, name="second_stage")(embedded)
    x = layers.Add(name="third_stage")([layers.Dense(WIDTH)(x), embedded])
    return keras.Model(tokens, embedding(x, reverse=True))


def test_masks_skips_and_tied_weights() -> None:
    strategy = runs.strategy_of(3, micro_batches=2, cuts=["second_stage", "third_stage"])
    with strategy.scope():
        model = runs.made(tied_model, lambda m: m.compile("sgd", "sparse_categorical_crossentropy"))
    tokens, words = runs.TOKENS[:24].astype("int32"), runs.TARGETS["words"][:24]
    model.fit(tokens, words, batch_size=12, verbose=0)
    activation, mask, table = 24 * LENGTH * WIDTH * 4, 24 * LENGTH, 2 * WORDS * WIDTH * 4  # of two steps
    back = LinkStats(activation_gradient_bytes=activation)
    assert links(strategy) == {
        (0, 1): LinkStats(activation_bytes=activation + mask),
        (1, 2): LinkStats(activation_bytes=activation + mask),
        (0, 2): LinkStats(
            batch_bytes=24 * LENGTH * words.itemsize, activation_bytes=activation + mask, weight_bytes=table
        ),
        (1, 0): back,
        (2, 1): back,
        (2, 0): back + LinkStats(weight_gradient_bytes=table),
    }


def test_sequences_of_unknown_length() -> None:
    strategy = runs.strategy_of(2, micro_batches=2)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((None, 4)), layers.Dense(WIDTH, "relu"), layers.Dense(3)])
        model.compile("sgd", "mse")
    signature = (tf.TensorSpec([None, None, 4]), tf.TensorSpec([None, None, 3]))
    batches = [(np.ones([rows, length, 4], "f"), np.ones([rows, length, 3], "f")) for rows, length in ((8, 5), (6, 9))]
    model.fit(tf.data.Dataset.from_generator(lambda: batches, output_signature=signature), verbose=0)
    elements = 8 * 5 + 6 * 9
    assert links(strategy) == {
        (0, 1): LinkStats(batch_bytes=elements * 3 * 4, activation_bytes=elements * WIDTH * 4),
        (1, 0): LinkStats(activation_gradient_bytes=elements * WIDTH * 4),
    }


def test_everything_that_the_traced_steps_send_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walks the graphs for tensors that an operation on another device uses: what TensorFlow sends."""
    steps: list[tuple[str, Any, dict[Any, Any]]] = []
    add = LinkCounters.add

    def add_and_keep(self: LinkCounters, step: str, sent: Any, updates: Any = 0) -> None:
        steps.append((step, tf.compat.v1.get_default_graph(), dict(sent)))
        add(self, step, sent, updates)

    monkeypatch.setattr(LinkCounters, "add", add_and_keep)
    arrays = (runs.INPUTS, runs.TARGETS, runs.SAMPLE_WEIGHTS)
    data = tf.data.Dataset.from_tensor_slices(arrays).batch(24, drop_remainder=True)
    strategy = runs.strategy_of(2, 2, "bf16", micro_batches=2)
    with strategy.scope():
        optimizer = keras.optimizers.Adam(global_clipnorm=1.0, use_ema=True, weight_decay=0.01)
        model = runs.made(runs.transformer, lambda m: runs.compile_transformer(m, optimizer))
    model.fit(data, verbose=0)
    model.evaluate(data, verbose=0)
    model.predict(data, verbose=0)
    assert {step for step, *_ in steps} == {"train_step", "test_step", "predict_step"}
    for step, graph, sent in steps:
        counted: dict[tuple[str, str], int] = defaultdict(int)
        for (source, target, kind), nbytes in sent.items():
            # Outputs of `predict` leave the graph on the device of the last stage.
            if kind != DENSE and not (step == "predict_step" and target == strategy.columns[0][0]):
                counted[source, target] += int(nbytes)
        assert bytes_between_devices(graph) == dict(counted), step


def bytes_between_devices(graph: Any) -> dict[tuple[str, str], int]:
    todo = [tensor.op for tensor in graph.outputs] + [op for op in graph.get_operations() if op.op_def.is_stateful]
    done: set[Any] = set()
    sent: dict[tuple[str, str], dict[Any, int]] = defaultdict(dict)
    while todo:
        if (op := todo.pop()) in done:
            continue
        done.add(op)
        todo += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
        for tensor in op.inputs:
            source, target = tensor.op.device, op.device
            if source and target and source != target and tensor.shape.rank and tensor.dtype != tf.resource:
                sent[source, target][tensor.ref()] = tensor.shape.num_elements() * tensor.dtype.size
    return {link: sum(tensors.values()) for link, tensors in sent.items()}


def test_moving_statistics_of_copies_that_devices_share() -> None:
    """The second copy sends its share to the device that holds the variable, which sends the sum to all others."""
    strategy = models.strategy_of(2, columns=2)
    with strategy.scope():
        x = keras.Input((12,))
        hidden = layers.Dense(8, name="down")(layers.Dense(16, "gelu", name="up")(x))
        model = keras.Model(x, layers.Dense(5, name="head")(layers.BatchNormalization()(hidden)))
        runs.compile_classifier(model, keras.optimizers.SGD(0.1))
    model.fit(runs.X[:16], runs.CLASSES[:16], batch_size=16, verbose=0)
    weights = {link: stats.weight_bytes for link, stats in links(strategy, "train_step").items()}
    of_statistics = 2 * 8 * 4  # mean and variance
    expected = dict.fromkeys([(2, 0), (0, 1), (0, 2), (0, 3)], of_statistics)
    assert {link: sent for link, sent in weights.items() if sent} == expected


def test_rows_that_are_sent_while_others_warm_up() -> None:
    """They are counted within a branch of the step, also if the number of rows is known only when it runs."""
    policy = Policy({".*embeddings": None, ".*": WarmUp(ErrorFeedback(TopK(0.25)), 1)}, dense_below=0)
    pipeline = Pipeline(stages=1, micro_batches=2)
    strategy = ModelParallelStrategy(["CPU:0", "CPU:1"], pipeline=pipeline, data_parallel=2, compression=policy)
    with strategy.scope():
        words = keras.Input((LENGTH,), dtype="int32")
        hidden = layers.GlobalAveragePooling1D()(layers.Embedding(WORDS, WIDTH)(words))
        model = keras.Model(words, layers.Dense(3)(hidden))
        model.compile("sgd", "mse")
    x, y = np.ones((18, LENGTH), "int32"), np.ones((18, 3), "float32")
    counted = []
    for rows in (16, 18):  # with a last batch of two rows its size is not known while the step is traced
        before = strategy.communication.wire_bytes
        model.fit(x[:rows], y[:rows], batch_size=8, verbose=0)
        counted.append(strategy.communication.wire_bytes - before)
    assert 0 < counted[0] < counted[1]
