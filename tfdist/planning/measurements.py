"""What a probe has measured of a program and of a machine: plain records, written and read as JSON."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DENSE = "uncompressed"
SUM, GATHER, EXCHANGE = "sum", "gather", "exchange"
MESSAGE = "message"


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of a step, as a member of the group calls it.

    Attributes:
        kind: `SUM` (an all-reduce), `GATHER` (all members get all tensors) or `EXCHANGE` (an all-to-all).
        nbytes: The size of the tensor that this member passes.
        bucket: The number of the bucket, in the order in which backpropagation fills them. Collectives of a bucket run
            one after another, those of different buckets beside each other.
    """

    kind: str
    nbytes: int
    bucket: int


@dataclasses.dataclass(frozen=True)
class ExchangeMeasurement:
    """The gradient exchange of a step by one method in a group of some size, without a network.

    Attributes:
        method: The argument `compression=`, or `DENSE`.
        members: The number of members for which it was traced and computed.
        compute_seconds: The time of a core: packing, encoding, decoding, unpacking.
        collectives: The collectives in the order of the trace.
        state_bytes: Residuals and other state that the method keeps between steps.
        gradient_error: The error of a first exchange, without state: the norm of the difference of the decoded and the
            dense gradient, divided by the norm of the dense one.
    """

    method: str
    members: int
    compute_seconds: float
    collectives: tuple[Collective, ...]
    state_bytes: int
    gradient_error: float


@dataclasses.dataclass(frozen=True)
class StepMeasurement:
    """A training step of one worker that exchanges nothing.

    Attributes:
        rows: Number of samples.
        compiled: Whether XLA compiled it (`jit_compile=True`).
        seconds: Median time of a complete step of `fit`, with metrics and its data from memory.
        deviation_seconds: Standard deviation of the time of steps.
        forward_seconds: Part of `seconds`, up to the loss.
        update_seconds: Part of `seconds`, of the optimizer. What is left is backpropagation.
        peak_bytes: Largest resident memory of the process so far.
    """

    rows: int
    compiled: bool
    seconds: float
    deviation_seconds: float
    forward_seconds: float
    update_seconds: float
    peak_bytes: int

    @property
    def backward_seconds(self) -> float:
        """The time of backpropagation."""
        return max(self.seconds - self.forward_seconds - self.update_seconds, 0.0)


@dataclasses.dataclass(frozen=True)
class LayerMeasurement:
    """A call of a layer.

    Attributes:
        name: The layer's name.
        seconds: Time of both passes, forward and backward, for a batch of `rows` samples of `ProgramMeasurement`.
        parameters: Number of trainable weights.
        activation_bytes: The layer's outputs for one sample.
    """

    name: str
    seconds: float
    parameters: int
    activation_bytes: int


@dataclasses.dataclass(frozen=True)
class ProgramMeasurement:
    """A program's model and its first `fit`.

    Attributes:
        rows: Samples of a global batch, as `fit` was called.
        samples: Samples of an epoch; None: unknown.
        steps: Measured steps, at least one of `rows` samples that is not compiled.
        exchanges: Measured exchanges; those of `DENSE` at least.
        bucket_ready: The part of backpropagation, in (0, 1], after which the gradients of a bucket are known, for each
            bucket of the dense exchange.
        layers: In the order of computation; empty if the model is no graph of layers (then stages cannot be planned).
        variable_bytes: All weights and states of the model.
        gradient_bytes: The size of a dense gradient of all trainable weights.
        slot_bytes: The optimizer's variables of the weights.
        process_bytes: Resident memory of the process before the model was trained.
        data_seconds: Time to produce a global batch from the program's data.
        is_functional: Whether `ModelParallelStrategy` can cut the model into stages.
        optimizer: Name of the optimizer's class.
        save_seconds: Time to write the model's and the optimizer's variables to memory, as a checkpoint does.
        start_seconds: From the start of the process to the first step.
        exchanges_per_step: How often `exchanges` happen in a step; below 1 if the program accumulates gradients.
        other_collectives: What a step exchanges beside gradients (numbers of samples, metrics), one after another.
    """

    rows: int
    samples: int | None
    steps: tuple[StepMeasurement, ...]
    exchanges: tuple[ExchangeMeasurement, ...]
    bucket_ready: tuple[float, ...]
    layers: tuple[LayerMeasurement, ...]
    variable_bytes: int
    gradient_bytes: int
    slot_bytes: int
    process_bytes: int
    data_seconds: float
    is_functional: bool
    optimizer: str
    save_seconds: float
    start_seconds: float
    exchanges_per_step: float = 1.0
    other_collectives: tuple[Collective, ...] = ()


@dataclasses.dataclass(frozen=True)
class TransferMeasurement:
    """An exchange between two processes of this machine, each on a separate core, without a limit on the link.

    Attributes:
        kind: `SUM`, `GATHER` or `EXCHANGE` of tensors of a graph; `MESSAGE`, a short one in each direction, outside of
            TensorFlow.
        nbytes: What each passes.
        seconds: Lower quartile of the time of one exchange, which other processes of the machine delay.
        core_seconds: How long a core of each process was busy with it.
    """

    kind: str
    nbytes: int
    seconds: float
    core_seconds: float


@dataclasses.dataclass(frozen=True)
class MachineMeasurement:
    """A machine.

    Attributes:
        cores: Usable cores.
        cores_per_worker: Cores on which the program was measured.
        memory_bytes: Memory that may be used.
        transfers: Transfers by sockets, as between hosts: at least three sizes of each kind.
        connection_bytes: By how much the memory of a process that has exchanged tensors of 16 MiB exceeds that of a
            process without an exchange; 0 if it was not measured.
        local_transfers: Transfers by shared memory, as between workers of this machine; empty: as `transfers`.
    """

    cores: int
    cores_per_worker: int
    memory_bytes: int
    transfers: tuple[TransferMeasurement, ...]
    connection_bytes: int = 0
    local_transfers: tuple[TransferMeasurement, ...] = ()


@dataclasses.dataclass(frozen=True)
class Measurements:
    """All that a plan is predicted from."""

    program: ProgramMeasurement
    machine: MachineMeasurement
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Measurements":
        """Reads what `to_json` has returned.

        Raises:
            KeyError, TypeError: The document is another one.
        """
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

    @classmethod
    def read(cls, path: Path) -> "Measurements":
        """Reads a file of `json.dump(measurements.to_json())`."""
        return cls.from_json(json.loads(path.read_text()))
