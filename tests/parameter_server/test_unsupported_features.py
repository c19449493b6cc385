"""Models that workers cannot train are rejected with the remedy."""

import keras
import pytest

from tfdist.parameter_server.unsupported_features import reject_unsupported_model

pytestmark = pytest.mark.usefixtures("cpus")

REJECTED = [
    ({"optimizer": None}, "The model has no optimizer.", "Give one to `compile`"),
    ({"run_eagerly": True}, "Workers run functions only. Received: run_eagerly=True.", "without a strategy"),
    ({"optimizer": "accumulating"}, "gradient_accumulation_steps", "Pass `gradient_accumulation_steps` to"),
    ({"optimizer": "wrapped"}, "gradient_accumulation_steps", "Pass `gradient_accumulation_steps` to"),
]


@pytest.mark.parametrize(("arguments", "received", "remedy"), REJECTED)
def test_compile_arguments(arguments, received, remedy):
    accumulating = keras.optimizers.SGD(gradient_accumulation_steps=2)
    optimizers = {
        "accumulating": accumulating,
        "wrapped": keras.optimizers.LossScaleOptimizer(accumulating),
        None: None,
    }
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    reject_unsupported_model(model)
    given = {"optimizer": "sgd", "loss": "mse", "jit_compile": False, **arguments}
    given["optimizer"] = optimizers.get(given["optimizer"], given["optimizer"])
    model.compile(**given)
    with pytest.raises(ValueError) as error:
        reject_unsupported_model(model)
    assert received in str(error.value) and remedy in str(error.value)


def test_synchronized_batch_normalization():
    model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(synchronized=True)])
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(ValueError, match="synchronized=False"):
        reject_unsupported_model(model)
