"""Models of KerasHub from configurations, in columns, stages and shards; writes the differences from one process."""

import json
import sys
from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np
import pipeline_runs as runs
import tensorflow as tf

from tfdist.keras_internals.placed_variables import held_variable
from tfdist.strategies import ModelParallelStrategy, Pipeline, auto_layout
from tfdist.tensor_parallel.split_variable import SplitVariable

LENGTH, WORDS, SAMPLES = 8, 48, 64
SIZES = {"vocabulary_size": WORDS, "num_layers": 2, "num_heads": 4, "hidden_dim": 16, "intermediate_dim": 32}
rng = np.random.default_rng(0)
INPUTS = {"token_ids": rng.integers(1, WORDS, (SAMPLES, LENGTH)), "padding_mask": np.ones((SAMPLES, LENGTH), "int32")}
INPUTS["padding_mask"][:, 6:] = rng.integers(0, 2, (SAMPLES, 2))
SEGMENTS = {"segment_ids": rng.integers(0, 2, (SAMPLES, LENGTH))}


def gpt2() -> keras.Model:
    backbone = keras_hub.models.GPT2Backbone(**SIZES, dropout=0.0, max_sequence_length=LENGTH)
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)


def bert() -> keras.Model:
    backbone = keras_hub.models.BertBackbone(**SIZES, dropout=0.0, max_sequence_length=LENGTH)
    return keras_hub.models.BertTextClassifier(backbone, num_classes=3, preprocessor=None, dropout=0.0)


GROUPED = {"num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}
GROUPED |= {"vocabulary_size": WORDS, "num_layers": 2}


def llama() -> keras.Model:
    backbone = keras_hub.models.LlamaBackbone(**GROUPED, tie_word_embeddings=True)
    return keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)


def mistral() -> keras.Model:
    return keras_hub.models.MistralCausalLM(keras_hub.models.MistralBackbone(**GROUPED), preprocessor=None)


def gemma() -> keras.Model:
    backbone = keras_hub.models.GemmaBackbone(**GROUPED, head_dim=4)
    return keras_hub.models.GemmaCausalLM(backbone, preprocessor=None)


MODELS = {
    **{one.__name__: (one, INPUTS, rng.integers(0, WORDS, (SAMPLES, LENGTH))) for one in (llama, mistral, gemma)},
    "gpt2": (gpt2, INPUTS, rng.integers(0, WORDS, (SAMPLES, LENGTH))),
    "bert": (bert, INPUTS | SEGMENTS, rng.integers(0, 3, SAMPLES)),
}


def _compile(model: keras.Model) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])


def main(name: str, results: Path) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 8)
    build, inputs, targets = MODELS[name]
    pipeline = Pipeline(stages=2, micro_batches=2)
    devices = [f"CPU:{index}" for index in range(8)]
    layout = auto_layout(build(), 2)
    strategy = ModelParallelStrategy(devices, pipeline=pipeline, data_parallel=2, layout_map=layout)
    model, reference, logs = runs.fit_both(strategy, build, _compile, inputs, targets, epochs=5, traced=True)
    lines: list[str] = []
    strategy.summary(model, lines.append)
    found: dict[str, Any] = {
        "weights": runs.difference(model.weights, reference.weights),
        "logs": logs,
        "steps": int(reference.optimizer.iterations.numpy()),
        "split": sum(isinstance(held_variable(one), SplitVariable) for one in model.weights),
        "summary": lines,
    }
    results.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
