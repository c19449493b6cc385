"""Models of tests. The same seed gives the same initial weights: a layer draws its own seed when it is created."""

import keras
from keras import layers


def dense(features=6, hidden=(8,), outputs=1, activation="tanh"):
    """Layers of a matrix and a vector, with an activation between them."""
    units = [layers.Dense(size, activation=activation) for size in hidden]
    return keras.Sequential([keras.Input((features,)), *units, layers.Dense(outputs)])


def classifier():
    """A dense model with a probability for each of 4 classes."""
    return keras.Sequential([*dense(outputs=4).layers, layers.Softmax()])


def words(count=3, vocabulary=30, size=5, outputs=1):
    """A table of words, whose gradients are sparse, and a dense layer."""
    embedded = [layers.Embedding(vocabulary, size), layers.Flatten(), layers.Dense(outputs)]
    return keras.Sequential([keras.Input((count,), dtype="int32"), *embedded])


def numbers_and_words(vocabulary=30):
    """A model with dense and sparse gradients."""
    numbers, ids = keras.Input((6,)), keras.Input((3,), dtype="int32")
    embedded = layers.Flatten()(layers.Embedding(vocabulary, 5)(ids))
    inner = layers.Dense(17, activation="tanh")(layers.Concatenate()([numbers, embedded]))
    return keras.Model([numbers, ids], layers.Dense(1)(inner))


def sequence():
    """A convolution over steps."""
    inner = [layers.Conv1D(4, 3, activation="tanh"), layers.Flatten()]
    return keras.Sequential([keras.Input((6, 3)), *inner, layers.Dense(1)])
