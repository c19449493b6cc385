"""Workers whose weights and gradients are compared for 10,000 steps. Each writes how often they were."""

import sys
from pathlib import Path

import keras
import numpy as np

from tfdist.callbacks import WeightComparison
from tfdist.strategies import MultiWorkerMirroredStrategy

STEPS, EVERY_STEPS = 10_000, 10


def main(folder: Path) -> None:
    """Trains."""
    strategy = MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    rows = np.random.default_rng(0).normal(size=(300, 4)).astype("float32")
    with strategy.scope():
        layers = [keras.layers.Dense(8, "gelu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.AdamW(0.01, global_clipnorm=1.0, use_ema=True), "mse")
    comparison = WeightComparison(EVERY_STEPS, check_gradients=0.5)
    epochs = STEPS * 6 // len(rows)
    model.fit(rows, np.tanh(rows[:, :1]), batch_size=6, epochs=epochs, verbose=0, callbacks=[comparison])
    (folder / f"comparisons-{strategy.rank}").write_text(str(comparison.comparisons))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
