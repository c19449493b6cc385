"""Which variable is compressed how, names, and what is said of mistakes."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tfdist import compression
from tfdist.compression import (
    Cast,
    Dense,
    ErrorFeedback,
    MomentumCorrection,
    Policy,
    PowerSGD,
    Quantize,
    RandomK,
    Sign,
    TopK,
    WarmUp,
)

pytestmark = pytest.mark.usefixtures("cpus")
NAMED = {
    "dense": Dense(),
    "bf16": Cast("bfloat16"),
    "fp16": Cast("float16"),
    "fp8": Cast("float8"),
    "int8": Quantize(8),
    "int4": Quantize(4),
    "qsgd": Quantize(8, stochastic=True),
    "sign": Sign(),
    "topk": TopK(0.01),
    "topk:0.05": TopK(0.05),
    "randomk": RandomK(0.01),
    "randomk:0.5": RandomK(0.5),
    "powersgd": PowerSGD(4),
    "powersgd:16": PowerSGD(16),
}


@pytest.mark.parametrize("name", NAMED)
def test_names(name):
    assert compression.get(name) == NAMED[name]
    assert hash(compression.get(name)) == hash(NAMED[name])
    assert repr(compression.get(name)) == repr(NAMED[name])


def test_compressors_of_other_settings_are_others():
    others = [*NAMED.values(), ErrorFeedback(TopK(0.01)), WarmUp(TopK(0.01), 1), WarmUp(TopK(0.01), 2)]
    others.pop(list(NAMED).index("topk"))
    assert len(set(others)) == len(others)
    assert TopK(0.01) != TopK(0.01, 200)
    assert PowerSGD(4) != PowerSGD(4, seed=1)


def test_the_first_rule_that_is_found_in_a_path_counts():
    policy = Policy({"embedding": "topk:0.1", r"dense/kernel$": Cast(), "logits": None, "kernel": "int8"})
    chosen = {
        "model/embedding/embeddings": ErrorFeedback(TopK(0.1)),
        "model/dense/kernel": Cast(),
        "model/dense/kernel_1": ErrorFeedback(Quantize(8)),
        "logits/kernel": Dense(),
        "model/norm/gamma": Dense(),
        "embedding/dense/kernel": ErrorFeedback(TopK(0.1)),
    }
    assert {path: policy.compressor_for(path) for path in chosen} == chosen


def test_error_feedback_is_there_where_the_method_is_biased():
    with_feedback = {name for name in NAMED if isinstance(Policy(name).compressor_for(""), ErrorFeedback)}
    assert with_feedback == set(NAMED) - {"dense", "bf16", "qsgd"}
    assert Policy(ErrorFeedback(Cast())).compressor_for("") == ErrorFeedback(Cast()), "asked for"
    assert Policy(MomentumCorrection(TopK())).compressor_for("") == MomentumCorrection(TopK())


def test_warm_up_wraps_all_but_dense():
    policy = Policy({"kernel": "sign", "bias": "dense"}, dense_steps=5)
    assert policy.compressor_for("kernel") == WarmUp(ErrorFeedback(Sign()), 5)
    assert policy.compressor_for("bias") == policy.compressor_for("gamma") == Dense()


@pytest.mark.parametrize("rules", [None, "dense", {}, {"kernel": None}, Dense()])
def test_a_policy_without_a_method_compresses_nothing(rules):
    assert not Policy(rules, dense_steps=10).compresses
    assert not Policy(rules).is_worthwhile("kernel", (1000, 1000))


@pytest.mark.parametrize(
    ("method", "shape", "worthwhile"),
    [
        ("int8", (1024,), True),
        ("int8", (1023,), False),  # small
        ("bf16", (0, 5000), False),
        ("powersgd:4", (5000,), False),  # a vector
        ("powersgd:4", (100, 100), True),
        ("powersgd:16", (4000, 17), False),  # 16 (4000 + 17) numbers for 17 * 4000: 0.95
        ("powersgd:16", (4000, 20), True),  # 0.8
        ("topk:0.5", (100, 100), True),
        ("randomk:0.5", (100, 100), True),
        ("dense", (1000, 1000), False),
    ],
)
def test_small_and_badly_compressible_variables_stay_dense(method, shape, worthwhile):
    assert Policy(method).is_worthwhile("kernel", shape) == worthwhile


def test_dense_below_is_the_callers():
    assert Policy("int8", dense_below=0).is_worthwhile("kernel", (512,))
    assert not Policy("int8", dense_below=10**6).is_worthwhile("kernel", (999, 1000))
    assert not Policy("sign", dense_below=0).is_worthwhile("kernel", (8,)), "a block of signs is longer than it"


MISTAKES = {
    "unknown name": (
        lambda: Policy("gzip"),
        "Unknown compressor name. Received: 'gzip'. Expected: one of dense, bf16",
    ),
    "argument": (lambda: Policy("int8:3"), "Unknown compressor name. Received: 'int8:3'"),
    "no number": (lambda: Policy("topk:few"), "Invalid argument of the compressor name 'topk:few': could not convert"),
    "no ratio": (lambda: Policy("topk:2"), "name 'topk:2': Invalid `ratio`.*ratio=2.0.*at most 0.5"),
    "rank of a name": (lambda: Policy("powersgd:0"), "Invalid argument.*rank=0.*at least 1"),
    "no compressor": (
        lambda: Policy({"kernel": 8}),
        "Invalid compressor. Received: 8. Expected: a tfdist.*a name",
    ),
    "expression": (
        lambda: Policy({"(": "int8"}),
        r"not a regular expression \(.*Received: '\('. Expected: an",
    ),
    "key": (lambda: Policy({7: "int8"}), "not a regular expression.*Received: 7"),
    "dense_below": (
        lambda: Policy("int8", dense_below=-1),
        "Invalid `dense_below`. Received: dense_below=-1.*at least 0",
    ),
    "dense_below bool": (lambda: Policy("int8", dense_below=True), "Received: dense_below=True"),
    "dense_steps": (
        lambda: Policy("int8", dense_steps=-1),
        "Invalid `dense_steps`. Received: dense_steps=-1.*at least 0",
    ),
    "dense_steps float": (lambda: Policy("int8", dense_steps=2.5), "Received: dense_steps=2.5"),
    "cast": (lambda: Cast("float32"), "Invalid `dtype`.*dtype='float32'. Expected: 'bfloat16', 'float16' or 'float8'"),
    "bits": (lambda: Quantize(2), "bits=2. Expected: 8 or 4"),
    "blocks": (
        lambda: Quantize(8, 12),
        "Invalid `block_size`. Received: block_size=12. Expected: a positive multiple of 8",
    ),
    "blocks of signs": (lambda: Sign(0), "block_size=0. Expected: a positive multiple of 32"),
    "ratio": (lambda: TopK(0.6), "Invalid `ratio`. Received: ratio=0.6. Expected: a number above 0 and at most 0.5"),
    "ratio 0": (lambda: RandomK(0), "ratio=0. Expected"),
    "block of top-k": (
        lambda: TopK(0.01, 50),
        "Invalid `block_size` for ratio=0.01. Received: block_size=50.*between 100 and 65536",
    ),
    "too large": (lambda: TopK(0.01, 1 << 17), "block_size=131072"),
    "seed": (lambda: RandomK(0.1, seed="a"), "Invalid `seed`. Received: seed='a'. Expected: an integer"),
    "rank": (
        lambda: PowerSGD(0),
        "Invalid `rank`. Received: rank=0. Expected: a whole number of at least 1",
    ),
    "seed of a factor": (lambda: PowerSGD(1, seed=-1), "Invalid `seed`. Received: seed=-1"),
    "momentum": (lambda: MomentumCorrection(TopK(), 1.0), "Invalid `momentum`. Received: 1.0.*below 1"),
    "clipnorm": (
        lambda: MomentumCorrection(TopK(), 0.9, 0),
        "Invalid `clipnorm`. Received: 0. Expected: a number above 0",
    ),
    "what to correct": (
        lambda: MomentumCorrection(Sign()),
        "sends a part.*Received: Sign.*TopK.*With other methods use the",
    ),
    "wrapped": (lambda: MomentumCorrection(ErrorFeedback(TopK())), "not wrapped"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_with_what_was_received_and_expected(name):
    make, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert re.search("Received: .*Expected: ", str(error.value)) or "Invalid argument" in str(error.value)


def test_dtypes_of_tensorflow_are_casts_too():
    assert Cast(tf.bfloat16) == Cast("bfloat16")
    assert Cast(tf.float16) == Cast("float16")
    assert Cast(tf.dtypes.experimental.float8_e4m3fn) == Cast("float8")


def test_the_momentum_of_a_warm_up_is_plain_momentum():
    """Section 3.3: the first steps go out uncompressed, and the velocity that they leave is that of momentum SGD."""
    from replica_threads import on_replicas

    method = WarmUp(MomentumCorrection(TopK(0.1, 64), 0.9), 3)
    shape, size = (10, 64), 3
    gradients = np.random.default_rng(0).normal(size=(4, size, *shape)).astype("float32")

    def run(group, rank):
        state, sums = method.initial_state(shape), []
        for step in range(4):
            reduced = method.reduce([tf.constant(gradients[step, rank])], group, [state])
            (summed,), (state,) = reduced.sums, reduced.states
            sums.append(summed.numpy())
        return sums, state

    (sums, state), *_ = on_replicas(size, run)[0]
    velocity = np.zeros(shape)
    for step in range(3):
        velocity = 0.9 * velocity + gradients[step].sum(axis=0)
        np.testing.assert_allclose(sums[step], velocity, rtol=1e-5, atol=1e-5)
    assert np.count_nonzero(sums[3]) <= size * 6 * 10, "then of each block of 64 the six largest"
    assert int(state["warm_up_steps"]) == 4
