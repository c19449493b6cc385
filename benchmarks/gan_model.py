"""A model with its own `train_step`: a generator and a discriminator of convolutions, with an optimizer each."""

from typing import Any

import keras
import tensorflow as tf

_NOISE = 64


class GAN(keras.Model):
    """A convolutional GAN for images `[batch, 32, 32, 3]`, after Radford, Metz and Chintala 2015 (DCGAN)."""

    def __init__(self) -> None:
        """Builds both networks: 0.6 M parameters."""
        super().__init__(name="gan")
        layers = keras.layers
        self.generator = keras.Sequential(
            [
                keras.Input((_NOISE,)),
                layers.Dense(4 * 4 * 128, activation="relu"),
                layers.Reshape((4, 4, 128)),
                layers.Conv2DTranspose(64, 4, strides=2, padding="same", activation="relu"),
                layers.Conv2DTranspose(64, 4, strides=2, padding="same", activation="relu"),
                layers.Conv2DTranspose(3, 4, strides=2, padding="same", activation="tanh"),
            ],
            name="generator",
        )
        self.discriminator = keras.Sequential(
            [
                keras.Input((32, 32, 3)),
                *(layers.Conv2D(width, 4, 2, "same", activation="leaky_relu") for width in (64, 128, 128)),
                layers.Flatten(),
                layers.Dense(1),
            ],
            name="discriminator",
        )
        self.noise_seed = keras.random.SeedGenerator(0)
        self.built = True

    def compile(self, optimizer: Any, loss: Any = None, **options: Any) -> None:
        """Compiles; the generator gets an optimizer like `optimizer`, and `loss` is not used."""
        super().compile(optimizer=optimizer, loss=None, **options)
        self.generator_optimizer = type(optimizer).from_config(optimizer.get_config())
        self.generator_optimizer.build(self.generator.trainable_variables)
        optimizer.build(self.discriminator.trainable_variables)
        self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True)
        self.generator_loss = keras.metrics.Mean(name="loss")

    def train_step(self, data: Any) -> dict[str, Any]:
        """Trains the discriminator on true and made images, then the generator."""
        images, _ = data
        rows = tf.shape(images)[0]
        made = self.generator(self._noise(rows), training=True)
        truths = tf.concat([tf.ones((rows, 1)), tf.zeros((rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            logits = self.discriminator(tf.concat([images, made], axis=0), training=True)
            loss = self.loss_of(truths, logits)
        weights = self.discriminator.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            logits = self.discriminator(self.generator(self._noise(rows), training=True), training=True)
            loss = self.loss_of(tf.ones((rows, 1)), logits)
        weights = self.generator.trainable_variables
        self.generator_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.generator_loss.update_state(loss)
        return {"loss": self.generator_loss.result()}

    def call(self, noise: Any) -> Any:
        """Returns images for noise `[batch, 64]`."""
        return self.generator(noise)

    def _noise(self, rows: Any) -> tf.Tensor:
        return keras.random.normal((rows, _NOISE), seed=self.noise_seed)
