"""What needs no cluster: parts of batches and tables, tallies, sums of metrics, encoding, refusals."""

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.mark.parametrize(
    ("rows", "parts", "sizes"), [(7, 3, [3, 2, 2]), (4, 2, [2, 2]), (2, 3, [1, 1]), (1, 4, [1]), (0, 2, [0])]
)
def test_rows_are_shared_out_in_order(rows, parts, sizes):
    import tensorflow as tf

    from tfdist.parameter_server.rows import split

    values = np.arange(rows * 2).reshape(rows, 2)
    batch = ({"a": tf.constant(values), "b": (tf.constant(values[:, 0]),)}, tf.constant(-values), None)
    pieces = split(batch, parts)
    assert [len(piece[0]["a"]) for piece in pieces] == sizes
    for leaf, expected in (
        (lambda p: p[0]["a"], values),
        (lambda p: p[0]["b"][0], values[:, 0]),
        (lambda p: p[1], -values),
    ):
        np.testing.assert_array_equal(np.concatenate([leaf(piece) for piece in pieces]), expected)
    assert all(piece[2] is None for piece in pieces)


def test_no_row_of_micro_batches_of_different_sizes_is_lost():
    import tensorflow as tf

    from tfdist.parameter_server.rows import split_all

    batches = [(tf.range(start, end)[:, tf.newaxis],) for start, end in ((0, 7), (7, 8), (8, 10))]
    parts = split_all(batches, 3)
    rows = [[piece[0][:, 0].numpy().tolist() for piece in part] for part in parts]
    assert rows == [[[0, 1, 2], [7], [8]], [[3, 4], [9]], [[5, 6]]]


def test_rows_of_sparse_tensors():
    import tensorflow as tf

    from tfdist.parameter_server.rows import split

    values = np.array([[0, 1, 0], [2, 0, 0], [0, 0, 3], [4, 5, 6], [0, 0, 0]], "float32")
    pieces = split((tf.sparse.from_dense(values), tf.constant(values)), 2)
    for (sparse, dense), expected in zip(pieces, (values[:3], values[3:]), strict=True):
        np.testing.assert_array_equal(tf.sparse.to_dense(sparse), expected)
        np.testing.assert_array_equal(dense, expected)


@pytest.mark.parametrize(("rows", "parts"), [(10, 4), (4, 4), (9, 1), (1001, 2)])
def test_parts_of_a_table(rows, parts):
    from tfdist.keras_internals.embeddings import part_sizes

    sizes = part_sizes(rows, parts)
    assert len(sizes) == parts and sum(sizes) == rows and max(sizes) - min(sizes) <= 1


def test_tally():
    from tfdist.parameter_server.tally import Tally

    tally = Tally(2)
    facts = {"worker": 1, "bytes_pushed": 10, "bytes_pulled": 100, "samples": 8}
    for staleness, counts in ((0, True), (4, True), (2, False)):
        tally.add({**facts, "staleness": staleness}, counts=counts)
    assert tally.counts[0].steps == tally.counts[0].samples == 0
    count = tally.counts[1]
    assert (count.steps, count.samples, count.left_out) == (3, 24, 1)
    assert (count.staleness, count.max_staleness) == (2.0, 4)
    assert (count.bytes_pushed, count.bytes_pulled) == (30, 300)


def test_shares_of_a_round():
    from tfdist.parameter_server.slots import shares

    assert shares([3, 1]) == [0.75, 0.25]


@pytest.mark.parametrize("in_order", [True, False])
def test_metrics_of_an_epoch_are_sums(in_order):
    import keras

    from tfdist.keras_internals.models import metric_variables
    from tfdist.parameter_server.metric_sums import MetricSums

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[keras.metrics.MeanAbsoluteError(name="mae")])
    model.evaluate(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
    model.reset_metrics()
    names = [variable.path for variable in metric_variables(model)]
    sums = MetricSums(model)
    assert sums.results() == {}
    # Steps of 3 samples with the mean error 2, and of 1 sample with 6.
    steps = [
        ([total * count if "total" in name else count for name in names], last)
        for total, count, last in ((2.0, 3.0, 0.5), (6.0, 1.0, 0.25))
    ]
    for number in (0, 1) if in_order else (1, 0):
        metrics, last = steps[number]
        sums.add_in_order(number, [np.float32(value) for value in metrics], {"loss": 0.0, "mae": 0.0, "last": last})
    results = {name: float(value) for name, value in sums.results().items()}
    assert results == {"loss": 3.0, "mae": 3.0, "last": 0.25}
    sums.store()
    assert [float(variable.numpy()) for variable in metric_variables(model)] == [
        12.0 if "total" in name else 4.0 for name in names
    ]
    sums.reset()
    assert sums.results() == {}


class TestEncoder:
    """What a worker remembers is a plain variable here."""

    SHAPE = (40, 30)

    def encoder(self, method):
        import tensorflow as tf

        from tfdist.compression import Policy
        from tfdist.parameter_server.encoding import Encoder

        encoder = Encoder(Policy({"large": method}, dense_below=0), lambda value: tf.Variable(value, trainable=False))
        encoder.prepare(["large", "other"], [tf.TensorShape(self.SHAPE), tf.TensorShape([3])])
        return encoder

    @pytest.mark.parametrize("method", ["int8", "int4", "fp8", "sign", "topk:0.1", "randomk:0.1", "powersgd:2"])
    def test_what_is_delivered_and_kept_adds_up(self, method):
        from tfdist.compression import compressor_named

        encoder, random = self.encoder(method), np.random.default_rng(0)
        import tensorflow as tf

        given, delivered = np.zeros(self.SHAPE), np.zeros(self.SHAPE)
        for _ in range(3):
            gradient = random.normal(size=self.SHAPE).astype("float32")
            sent, size = encoder.encode(tf.constant(gradient), "large")
            given, delivered = given + gradient, delivered + sent.decode(sent.tensors).numpy()
            assert size == compressor_named(method).payload_bytes(self.SHAPE) < gradient.nbytes
            assert size == sum(tensor.numpy().nbytes for tensor in sent.tensors)
        residual = encoder._state["large"]["residual"].numpy()
        assert np.abs(residual).max() > 1e-4
        np.testing.assert_allclose(delivered + residual, given, atol=2e-5)

    def test_others_stay_as_they_are(self):
        import tensorflow as tf

        gradient = tf.constant([1.0, 2.0, 3.0])
        sent, size = self.encoder("int8").encode(gradient, "other")
        assert size == 12 and sent.decode(sent.tensors) is gradient

    def test_rows_are_sent_once_each(self):
        import tensorflow as tf

        rows = np.arange(12, dtype="float32").reshape(4, 3)
        slices = tf.IndexedSlices(tf.constant(rows), tf.constant([5, 2, 5, 5], tf.int64), tf.constant([9, 3]))
        sent, size = self.encoder("int8").encode(slices, "other")
        assert int(size) == 2 * (12 + 8)
        decoded = sent.decode(sent.tensors)
        np.testing.assert_array_equal(decoded.indices, [5, 2])
        np.testing.assert_array_equal(decoded.values, [rows[[0, 2, 3]].sum(0), rows[1]])


REFUSED = [
    ({"optimizer": None}, "The model has no optimizer.", "Name one in `compile`"),
    ({"run_eagerly": True}, "Workers run functions only. Received: run_eagerly=True.", "without a strategy"),
    ({"jit_compile": True}, "Received: jit_compile=True.", "tf.function(jit_compile=True)"),
    ({"optimizer": "accumulating"}, "gradient_accumulation_steps", "`accumulation_steps` to ParameterServerStrategy"),
    ({"optimizer": "wrapped"}, "gradient_accumulation_steps", "`accumulation_steps` to ParameterServerStrategy"),
]


@pytest.mark.parametrize(("arguments", "received", "remedy"), REFUSED)
def test_models_that_workers_cannot_train(arguments, received, remedy):
    import keras

    from tfdist.parameter_server.refusals import refuse_impossible

    accumulating = keras.optimizers.SGD(gradient_accumulation_steps=2)
    optimizers = {
        "accumulating": accumulating,
        "wrapped": keras.optimizers.LossScaleOptimizer(accumulating),
        None: None,
    }
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    refuse_impossible(model)
    given = {"optimizer": "sgd", "loss": "mse", "jit_compile": False, **arguments}
    given["optimizer"] = optimizers.get(given["optimizer"], given["optimizer"])
    model.compile(**given)
    with pytest.raises(ValueError) as error:
        refuse_impossible(model)
    assert received in str(error.value) and remedy in str(error.value)


def test_synchronized_batch_normalization_is_refused():
    import keras

    from tfdist.parameter_server.refusals import refuse_impossible

    model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(synchronized=True)])
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(ValueError, match="synchronized=False"):
        refuse_impossible(model)
