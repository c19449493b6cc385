"""What a probe has measured of a program and of a machine: plain records, written and read as JSON."""

import dataclasses
from collections.abc import Mapping
from typing import Any

DENSE = "uncompressed"
SUM, GATHER, EXCHANGE = "sum", "gather", "exchange"
MESSAGE = "message"


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of a step, as a member of the group calls it."""

    kind: str  # `SUM` (an all-reduce), `GATHER` (all members get all tensors) or `EXCHANGE` (an all-to-all)
    nbytes: int  # the size of the tensor that this member passes
    # the number of the bucket, in the order in which backpropagation fills them. Collectives of a bucket run one after
    # another, those of different buckets beside each other.
    bucket: int


@dataclasses.dataclass(frozen=True)
class ExchangeMeasurement:
    """The gradient exchange of a step by one method in a group of some size, without a network."""

    method: str  # the argument `compression=`, or `DENSE`
    members: int  # the number of members for which it was traced and computed
    compute_seconds: float  # the time of a core: packing, encoding, decoding, unpacking
    collectives: tuple[Collective, ...]  # the collectives in the order of the trace
    state_bytes: int  # residuals and other state that the method keeps between steps
    # the error of a first exchange, without state: the norm of the difference of the decoded and the dense gradient,
    # divided by the norm of the dense one
    gradient_error: float


@dataclasses.dataclass(frozen=True)
class StepMeasurement:
    """A training step of one worker that exchanges nothing."""

    rows: int  # number of samples
    compiled: bool  # whether XLA compiled it (`jit_compile=True`)
    seconds: float  # median time of a complete step of `fit`, with metrics and its data from memory
    deviation_seconds: float  # standard deviation of the time of steps
    forward_seconds: float  # part of `seconds`, up to the loss
    update_seconds: float  # part of `seconds`, of the optimizer. What is left is backpropagation.
    peak_bytes: int  # largest resident memory of the process so far

    @property
    def backward_seconds(self) -> float:
        return max(self.seconds - self.forward_seconds - self.update_seconds, 0.0)


@dataclasses.dataclass(frozen=True)
class LayerMeasurement:
    """A call of a layer."""

    name: str  # the layer's name
    seconds: float  # time of both passes, forward and backward, for a batch of `rows` samples of `ProgramMeasurement`
    parameters: int  # number of trainable weights
    activation_bytes: int  # the layer's outputs for one sample


@dataclasses.dataclass(frozen=True)
class ProgramMeasurement:
    """A program's model and its first `fit`."""

    rows: int  # samples of a global batch, as `fit` was called
    samples: int | None  # samples of an epoch; None: unknown
    steps: tuple[StepMeasurement, ...]  # measured steps, at least one of `rows` samples that is not compiled
    exchanges: tuple[ExchangeMeasurement, ...]  # measured exchanges; those of `DENSE` at least
    # the part of backpropagation, in (0, 1], after which the gradients of a bucket are known, for each bucket of the
    # dense exchange
    bucket_ready: tuple[float, ...]
    # in the order of computation; empty if the model is no graph of layers (then stages cannot be planned)
    layers: tuple[LayerMeasurement, ...]
    variable_bytes: int  # all weights and states of the model
    gradient_bytes: int  # the size of a dense gradient of all trainable weights
    slot_bytes: int  # the optimizer's variables of the weights
    process_bytes: int  # resident memory of the process before the model was trained
    data_seconds: float  # time to produce a global batch from the program's data
    is_functional: bool  # whether `ModelParallelStrategy` can cut the model into stages
    optimizer: str  # name of the optimizer's class
    save_seconds: float  # time to write the model's and the optimizer's variables to memory, as a checkpoint does
    start_seconds: float  # from the start of the process to the first step
    # how often `exchanges` happen in a step; below 1 if the program accumulates gradients
    exchanges_per_step: float = 1.0
    # what a step exchanges beside gradients (numbers of samples, metrics), one after another
    other_collectives: tuple[Collective, ...] = ()


@dataclasses.dataclass(frozen=True)
class TransferMeasurement:
    """An exchange between two processes of this machine, each on a separate core, without a limit on the link."""

    # `SUM`, `GATHER` or `EXCHANGE` of tensors of a graph; `MESSAGE`, a short one in each direction, outside of
    # TensorFlow
    kind: str
    nbytes: int  # what each passes
    seconds: float  # lower quartile of the time of one exchange, which other processes of the machine delay
    core_seconds: float  # how long a core of each process was busy with it


@dataclasses.dataclass(frozen=True)
class MachineMeasurement:
    """A machine."""

    cores: int  # usable cores
    cores_per_worker: int  # cores on which the program was measured
    memory_bytes: int  # memory that may be used
    # transfers by sockets, as between hosts: at least three sizes of each kind
    transfers: tuple[TransferMeasurement, ...]
    # by how much the memory of a process that has exchanged tensors of 16 MiB exceeds that of a process without an
    # exchange; 0 if it was not measured
    connection_bytes: int = 0
    # transfers by shared memory, as between workers of this machine; empty: as `transfers`
    local_transfers: tuple[TransferMeasurement, ...] = ()


@dataclasses.dataclass(frozen=True)
class Measurements:
    """All that a plan is predicted from."""

    program: ProgramMeasurement
    machine: MachineMeasurement
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Measurements":
        """Reads what `to_json` has returned; raises a KeyError or TypeError for anything else."""
        program, machine = dict(document["program"]), dict(document["machine"])
        program["steps"] = tuple(StepMeasurement(**record) for record in program["steps"])
        program["exchanges"] = tuple(
            ExchangeMeasurement(
                **record | {"collectives": tuple(Collective(**collective) for collective in record["collectives"])}
            )
            for record in program["exchanges"]
        )
        program["layers"] = tuple(LayerMeasurement(**record) for record in program["layers"])
        program["bucket_ready"] = tuple(program["bucket_ready"])
        program["other_collectives"] = tuple(Collective(**record) for record in program.get("other_collectives", ()))
        for name in ("transfers", "local_transfers"):
            machine[name] = tuple(TransferMeasurement(**record) for record in machine.get(name, ()))
        return cls(ProgramMeasurement(**program), MachineMeasurement(**machine), dict(document["versions"]))
