"""The program of a chief whose two stages are each shared by two workers; writes the differences from one process."""

import json
import sys
from pathlib import Path

import keras
import layout_models as models
import numpy as np
import pipeline_runs as runs

from tfdist.strategies import ModelParallelStrategy, Pipeline


def main(folder: Path) -> None:
    pipeline = Pipeline(stages=2, micro_batches=1)
    strategy = ModelParallelStrategy(pipeline=pipeline, layout_map=models.layout(2))
    model, reference, logs = runs.fit_both(
        strategy,
        lambda: models.transformer(1, dropout=0.3),
        lambda m: runs.compile_classifier(m, keras.optimizers.Adam(1e-2)),
        models.TOKENS,
        models.NEXT,
        epochs=7,
    )
    model.save(folder / "model.keras")
    loaded = keras.models.load_model(folder / "model.keras")
    model.set_weights([np.zeros(one.shape, "float32") for one in model.weights])
    model.load_weights(folder / "model.keras")
    results = {
        "columns": strategy.columns,
        "weights": runs.difference(models.without_key_biases(loaded), models.without_key_biases(reference)),
        "slots": runs.difference(model.optimizer.variables, reference.optimizer.variables),
        "logs": logs,
        "loaded": runs.difference(model.weights, loaded.weights),
    }
    (folder / "results.json").write_text(json.dumps(results, default=float))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
