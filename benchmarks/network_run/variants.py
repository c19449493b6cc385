"""Tables of the measured variants and links."""

from dataclasses import dataclass

TENSORFLOW = "tensorflow"
TORCH = "torch"
JAX = "jax"

FLOOR = "floor"
STOCK = "stock"
TFDIST = "tfdist"
FIT = "fit"
SHARDED = "sharded"
DDP = "ddp"
ZERO = "zero"
ONE_HOST = "one host"
DATA_PARALLEL = "data parallel"

_TORCH_POWERSGD = ("torch powersgd:4", "torch powersgd:4, one bucket")

# Values of `compression=`, and the nearest hooks of PyTorch: where it has no cast of that width, those that send the
# fewest bits per value; for methods below 16 bits also PowerSGD, PyTorch's only one.
METHODS: dict[str, tuple[str, ...]] = {
    "bf16": ("torch bf16",),
    "fp16": ("torch fp16",),
    "fp8": ("torch fp16", "torch bf16"),
    "int8": ("torch fp16", "torch bf16"),
    "int4": ("torch fp16", "torch bf16"),
    "sign": _TORCH_POWERSGD,
    "topk:0.01": _TORCH_POWERSGD,
    "randomk:0.01": _TORCH_POWERSGD,
    "powersgd:4": _TORCH_POWERSGD,
    "powersgd:1": ("torch powersgd:1",),
}


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        name: In the tables.
        framework: `"tensorflow"`, `"torch"` or `"jax"`.
        reduction: `"floor"` for no exchange at all, `"stock"`, `"tfdist"`, `"fit"` (tfdist under `model.fit`), `"ddp"`,
            `"data parallel"` (Keras' `DataParallel` on JAX), `"sharded"` (tfdist with sharded optimizer state),
            `"zero"` (DDP with `ZeroRedundancyOptimizer`).
        compression: Value of tfdist's `compression=`, or PyTorch's hook; `None` for dense.
        bucket_mb: PyTorch's `bucket_cap_mb`, `None` for its default.
        compiled: Whether XLA or `torch.compile` compiles it; JAX always compiles.
        shares_memory: Whether all workers are in one network namespace, as on one host: tfdist's then share memory.
            Measured on the unshaped link only.
        peers: Variants of other frameworks; the fastest one of each framework is compared with this one.
    """

    name: str
    framework: str
    reduction: str
    compression: str | None = None
    bucket_mb: int | None = None
    compiled: bool = False
    shares_memory: bool = False
    peers: tuple[str, ...] = ()

    @property
    def sends(self) -> bool:
        """Whether the workers exchange anything."""
        return self.reduction != FLOOR

    @property
    def processes(self) -> str:
        """The group of worker processes that runs it: one for each framework, cluster and place.

        >>> [BY_NAME[name].processes for name in ("dense", "stock", "dense, shared memory", "torch dense")]
        ['tensorflow', 'tensorflow stock', 'tensorflow one host', 'torch']
        """
        kinds = (STOCK if self.reduction == STOCK else "", ONE_HOST if self.shares_memory else "")
        return " ".join(filter(None, (self.framework, *kinds)))

    @property
    def is_method(self) -> bool:
        """Whether it is a compression method of tfdist, in the training step that all variants share."""
        return self.reduction == TFDIST and self.compression is not None


# PyTorch's `quantization_pertensor_hook` is left out: on gloo it fails with "invalid index of a 0-dim tensor", as it
# expects a list of lists from `all_gather(...).get_future()`, and gloo's future holds a list.
ALL = (
    Variant("floor", TENSORFLOW, FLOOR),
    Variant("floor, XLA", TENSORFLOW, FLOOR, compiled=True),
    Variant("stock", TENSORFLOW, STOCK),
    Variant("dense", TENSORFLOW, TFDIST, peers=("torch dense",)),
    Variant("dense, shared memory", TENSORFLOW, TFDIST, shares_memory=True, peers=("torch dense",)),
    *(Variant(name, TENSORFLOW, TFDIST, name, peers=peers) for name, peers in METHODS.items()),
    Variant("fit dense", TENSORFLOW, FIT, peers=("jax dense",)),
    Variant("fit dense, XLA", TENSORFLOW, FIT, compiled=True, peers=("torch dense, compiled", "jax dense")),
    Variant("fit powersgd:4", TENSORFLOW, FIT, "powersgd:4"),
    Variant("fit powersgd:4, XLA", TENSORFLOW, FIT, "powersgd:4", compiled=True),
    Variant("torch floor", TORCH, FLOOR),
    Variant("torch floor, compiled", TORCH, FLOOR, compiled=True),
    Variant("torch dense", TORCH, DDP),
    Variant("torch dense, compiled", TORCH, DDP, compiled=True),
    Variant("torch fp16", TORCH, DDP, "fp16"),
    Variant("torch bf16", TORCH, DDP, "bf16"),
    Variant(_TORCH_POWERSGD[0], TORCH, DDP, "powersgd:4"),
    Variant("torch powersgd:1", TORCH, DDP, "powersgd:1"),
    Variant(_TORCH_POWERSGD[1], TORCH, DDP, "powersgd:4", bucket_mb=1000),
    Variant("jax floor", JAX, FLOOR),
    Variant("jax dense", JAX, DATA_PARALLEL),
)
# For sharded_state.py.
SHARDED_STATE = (
    Variant("sharded", TENSORFLOW, SHARDED),
    Variant("sharded, bf16 weights", TENSORFLOW, SHARDED, "weights"),
    Variant("sharded, bf16", TENSORFLOW, SHARDED, "bf16"),
    Variant("torch ZeRO", TORCH, ZERO),
)
# For planning.py: `model.fit` with every method, with and without XLA; dense ones and PowerSGD are among `ALL`.
PLANNED = tuple(
    Variant(f"fit {name}{', XLA' * compiled}", TENSORFLOW, FIT, name, compiled=compiled)
    for name in METHODS
    for compiled in (False, True)
    if name != "powersgd:4"
)
BY_NAME = {variant.name: variant for variant in (*ALL, *SHARDED_STATE, *PLANNED)}

# Of each compiled variant: the same one without XLA or `torch.compile`.
NOT_COMPILED = {variant.name: variant.name.rpartition(",")[0] for variant in ALL if variant.compiled}

# Without those that compilers or JAX compute, and those that differ little from another one.
DEFAULT = tuple(
    variant.name
    for variant in ALL
    if not variant.compiled
    and variant.framework != JAX
    and variant.name not in ("fit powersgd:4", "torch powersgd:1", "torch powersgd:4")
)
# For more workers than cores: as workers share cores, only the ranking of the variants is meaningful.
FEW = ("floor", "stock", "dense", "int8", "powersgd:4", "torch dense", _TORCH_POWERSGD[1])

UNSHAPED = "unshaped"
# Bits per second of each link, by its name in the tables; `None`: not shaped.
GRID_LINKS: dict[str, int | None] = {
    UNSHAPED: None,
    "1 Gbit/s": 1_000_000_000,
    "100 Mbit/s": 100_000_000,
    "10 Mbit/s": 10_000_000,
}
DEFAULT_LINKS = (UNSHAPED, "1 Gbit/s", "100 Mbit/s")
LINKS = {**GRID_LINKS, "300 Mbit/s": 300_000_000}
