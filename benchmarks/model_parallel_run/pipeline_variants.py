"""Tables of what `benchmarks/model_parallel.py` compares, and the models that it cuts."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

TENSORFLOW = "tensorflow"
TORCH = "torch"
JAX = "jax"
TENSOR = "tensor"
MICRO_BATCHES = 8
BATCHES = 8
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        name: In the tables.
        framework: `"tensorflow"`, `"torch"` or `"jax"`.
        schedule: `"1f1b"`, `"gpipe"`, `"tensor"` for one stage whose variables are split, or None for one process.
        peers: The variants that it is compared with.
    """

    name: str
    framework: str
    schedule: str | None
    peers: tuple[str, ...] = ()


ALL = (
    Variant("tfdist 1f1b", TENSORFLOW, "1f1b", ("torch 1f1b",)),
    Variant("tfdist gpipe", TENSORFLOW, "gpipe", ("torch gpipe",)),
    Variant("keras, one process", TENSORFLOW, None, ("torch, one process",)),
    Variant("torch 1f1b", TORCH, "1f1b"),
    Variant("torch gpipe", TORCH, "gpipe"),
    Variant("torch, one process", TORCH, None),
)
OF_TENSOR = (
    Variant("tfdist tensor", TENSORFLOW, TENSOR, ("torch tensor", "jax tensor")),
    *(variant for variant in ALL if not variant.schedule),
    Variant("torch tensor", TORCH, TENSOR),
    Variant("jax tensor", JAX, TENSOR),
)
BY_NAME = {variant.name: variant for variant in (*ALL, *OF_TENSOR)}
STAGED = tuple(variant.name for variant in ALL if variant.schedule)


@dataclass(frozen=True)
class StagedWorkload:
    """A model in stages.

    Attributes:
        title: In tables and plots.
        batch_size: Of all micro-batches together.
        cuts: The names of the first layers of stages 1, 2 and so on in the Keras model.
        ends: Where stages 0, 1 and so on end among the parts of PyTorch's `Sequential`.
        ways: Over how many devices the variables of a stage are split.
        batch: Given an index, returns the inputs and integer labels of that batch, always the same.
    """

    title: str
    batch_size: int
    cuts: tuple[str, ...]
    ends: tuple[int, ...]
    batch: Callable[[int], tuple[np.ndarray, np.ndarray]]
    ways: int = 1

    @property
    def workers(self) -> int:
        """The number of devices."""
        return self.stages * self.ways

    @property
    def variants(self) -> tuple[Variant, ...]:
        """What is compared."""
        return ALL if self.ways == 1 else OF_TENSOR

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.cuts) + 1


@dataclass(frozen=True)
class MlpSizes:
    """The sizes of a multilayer perceptron with `hidden` layers of `width` units."""

    inputs: int
    width: int
    hidden: int
    classes: int


@dataclass(frozen=True)
class TransformerSizes:
    """The sizes of a decoder-only transformer."""

    sequence: int = 64
    vocabulary: int = 2000
    width: int = 256
    blocks: int = 6
    heads: int = 4


# Of "activations", which measures memory, the activations of a micro-batch are larger than all weights.
SIZES: dict[str, MlpSizes | TransformerSizes] = {
    "mlp": MlpSizes(784, 1664, 4, 10),
    "transformer": TransformerSizes(),
    "tensor": TransformerSizes(),
    "activations": MlpSizes(256, 256, 16, 10),
}


def features(index: int, *, batch_size: int, sizes: MlpSizes) -> tuple[np.ndarray, np.ndarray]:
    """Draws float32 `[batch_size, inputs]` and int32 `[batch_size]`; `index` is the seed."""
    random = np.random.default_rng((1, index))
    x = random.standard_normal((batch_size, sizes.inputs), dtype=np.float32)
    return x, random.integers(sizes.classes, size=batch_size, dtype=np.int32)


def tokens(index: int, *, batch_size: int, sizes: TransformerSizes) -> tuple[np.ndarray, np.ndarray]:
    """Draws windows of tokens, and the same ones shifted by one token, both int32; `index` is the seed.

    >>> x, y = tokens(0, batch_size=2, sizes=TransformerSizes())
    >>> x.shape, y.dtype.name, bool((x[:, 1:] == y[:, :-1]).all())
    ((2, 64), 'int32', True)
    """
    random = np.random.default_rng((1, index))
    drawn = random.integers(sizes.vocabulary, size=(batch_size, sizes.sequence + 1), dtype=np.int32)
    return drawn[:, :-1].copy(), drawn[:, 1:].copy()


def _mlp(title: str, name: str, batch_size: int, stages: int) -> StagedWorkload:
    sizes = SIZES[name]
    assert isinstance(sizes, MlpSizes)
    firsts = [sizes.hidden * stage // stages for stage in range(1, stages)]
    return StagedWorkload(
        title,
        batch_size,
        cuts=tuple(f"dense_{first}" for first in firsts),
        ends=tuple(2 * first for first in firsts),  # each layer has an activation
        batch=functools.partial(features, batch_size=batch_size, sizes=sizes),
    )


def _transformer(batch_size: int) -> StagedWorkload:
    sizes = SIZES["transformer"]
    assert isinstance(sizes, TransformerSizes)
    half = sizes.blocks // 2
    return StagedWorkload(
        "Transformer",
        batch_size,
        cuts=(f"norm_{half}",),
        ends=(1 + half,),  # the embedding is the first part
        batch=functools.partial(tokens, batch_size=batch_size, sizes=sizes),
    )


WORKLOADS = {
    "mlp": _mlp("MLP", "mlp", 128, 2),
    "transformer": _transformer(16),
    "tensor": dataclasses.replace(_transformer(16), title="Transformer, split", cuts=(), ends=(), ways=2),
    "activations": _mlp("MLP of large activations", "activations", 8 * 2048, 4),
}
