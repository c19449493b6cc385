"""The cases of the kit: each runs programs and compares what they have written with the reference."""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu_run import outcomes
from gpu_run.limited_processes import ROOT, CaseError, Finished, environment, finish

PROGRAM = Path(__file__).with_name("program.py")
METHODS = ("bf16", "fp16", "fp8", "int8", "int4", "qsgd", "sign", "topk:0.01", "randomk:0.01", "powersgd:4")
# What computes the same in float32: the difference is what the rounding of a policy changes.
EXACT_REFERENCES = {"mixed_float16": "convolutions", "mixed_bfloat16": "convolutions"}
_FLOORS = {"overflow": 8 * 2.0**-11}  # the rounding unit of float16, times the layers and updates
_NOISE_FACTOR = 2.0
_KILL_AT_STEP = 5
_REFUSED = "With NCCL workers cannot share a GPU."
_SUITE_FACTOR = 1.5  # of the limit, for the cases of `tests/parity`
_DEVICES_OF_PARITY = {"GPU": "--device_type=GPU", "CPU": "--device_type=CPU"}
PARITY_CASES = (
    "everything_on_arrays accumulation_with_clipping_ema_decay_and_schedule convolutions_without_samples "
    "loss_scale_overflow_on_one_replica loss_scale_overflow_in_an_accumulation embedding_with_global_clipnorm "
    "steps_per_execution masked_sequences synchronized_batch_normalization float8 sum_reduction custom_loop"
).split()


@dataclasses.dataclass(frozen=True)
class Machine:
    """On what the cases run.

    Attributes:
        kind: "GPU" or "CPU": what computes.
        gpus: The number of physical GPUs.
        limit_seconds: Of a process.
        folder: Where programs write, and which is empty.
        torch_python: An interpreter with PyTorch, if there is one.
        references: The names of the trainings in one process that the cases need.
        is_small: Whether models and numbers of steps are small, where only the path is of interest and not the speed.
    """

    kind: str
    gpus: int
    limit_seconds: float
    folder: Path
    torch_python: str | None = None
    references: tuple[str, ...] = ()
    is_small: bool = False

    def train(
        self,
        name: str,
        trainings: str,
        strategy: str,
        *arguments: str,
        launcher: Sequence[str] = (),
        kind: str | None = None,
        logical: int = 1,
        may_fail: bool = False,
        **variables: str,
    ) -> tuple[Path, Finished]:
        """Runs the program, returns the folder of its outcomes.

        Args:
            name: Of the folder.
            trainings: Names of trainings, separated by commas.
            strategy: What the program calls it.
            arguments: Further ones of the program.
            launcher: Arguments of `tfdist run`; none: one process.
            kind: Of devices, those of the machine by default.
            logical: Devices of each process.
            may_fail: See `finish`.
            variables: Of the environment.
        """
        kind, folder = kind or self.kind, self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        start = [sys.executable]
        if launcher:
            start += ["-m", "tfdist.launch", "run", "--start-timeout", "60", *launcher]
        command = [*start, str(PROGRAM), f"--trainings={trainings}", f"--strategy={strategy}", f"--kind={kind}"]
        command += [f"--logical={logical}", f"--folder={folder}", *arguments]
        environ = environment(uses_gpu=kind == "GPU", **variables)
        return folder, finish(command, environ, limit_seconds=self.limit_seconds, may_fail=may_fail)


@dataclasses.dataclass(frozen=True)
class Case:
    """A case and how it is run; `run` returns its figures, among them `ok`.

    Attributes:
        name: Of the case.
        run: Runs it.
        reference: The name of the training in one process that it is compared with.
    """

    name: str
    run: Callable[[Machine], dict[str, Any]]
    reference: str = ""


WORKERS = ("--workers", "2")


def references(machine: Machine) -> dict[str, Any]:
    """Trains in one process, on a device of the machine's kind: what all cases are compared with."""
    folder, finished = machine.train("reference", ",".join(machine.references), "none", may_fail=True)
    missing = [name for name in machine.references if not (folder / f"{name}-0.npz").exists()]
    row: dict[str, Any] = {"ok": not missing}
    if missing:
        row["error"] = f"no {', '.join(missing)}: {finished.last_lines()}"
    return row


def references_on_cpu(machine: Machine) -> dict[str, Any]:
    """Trains the same on a CPU: how much two devices that are both right differ."""
    if machine.kind == "CPU":
        return {"ok": True, "note": "the devices are CPUs"}
    folder, finished = machine.train("reference-cpu", ",".join(machine.references), "none", kind="CPU", may_fail=True)
    row: dict[str, Any] = {"ok": finished.code == 0}
    if finished.code:
        row["error"] = finished.last_lines()
    return row


def _noise(machine: Machine, training: str) -> float:
    cpu = machine.folder / "reference-cpu"
    if not (cpu / f"{training}-0.npz").exists():
        return 0.0
    reference = outcomes.arrays_of(machine.folder / "reference", training)
    return outcomes.largest_difference(reference, outcomes.arrays_of(cpu, training))


def _compared(
    machine: Machine, folder: Path, training: str, reference: str, *, ranks: int = 1, facts: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the largest difference from one process, what is allowed, and whether the workers are equal."""
    ours = outcomes.arrays_of(folder, training)
    expected = outcomes.arrays_of(machine.folder / "reference", reference)
    difference = outcomes.largest_difference(ours, expected)
    noise = _noise(machine, reference)
    allowed = max(_FLOORS.get(reference, outcomes.TOLERANCE), _NOISE_FACTOR * noise)
    if reference in EXACT_REFERENCES:
        exact = outcomes.arrays_of(machine.folder / "reference", EXACT_REFERENCES[reference])
        # Both round, so each may be as far from the exact result.
        allowed = max(allowed, 2 * outcomes.largest_difference(expected, exact))
    equal = all(
        outcomes.are_equal(ours, outcomes.arrays_of(folder, training, rank), only="weight") for rank in range(1, ranks)
    )
    row: dict[str, Any] = {"ok": bool(difference <= allowed and equal), "difference": difference, "allowed": allowed}
    row["noise"] = noise
    if ranks > 1:
        row["workers_equal"] = equal
    given = outcomes.facts_of(folder, training)
    row["device"] = given.get("device", "")[-5:]
    wanted = outcomes.facts_of(machine.folder / "reference", reference) if facts else {}
    for name in facts:
        row[name] = given[name]
        if given[name] != wanted[name]:
            row["ok"], row["error"] = False, f"{name}: {given[name]}, one process {wanted[name]}"
    return row


def _replicas(training: str, reference: str | None = None, *arguments: str, facts: Sequence[str] = ()) -> Any:
    def run(machine: Machine) -> dict[str, Any]:
        folder, _ = machine.train(
            f"replicas-{training}{''.join(arguments)}", training, "mirrored", *arguments, logical=2
        )
        return _compared(machine, folder, training, reference or training, facts=facts)

    return run


def _workers(
    training: str, reference: str | None = None, *arguments: str, logical: int = 1, facts: Sequence[str] = ()
) -> Any:
    def run(machine: Machine) -> dict[str, Any]:
        name = f"workers{logical}-{training}{''.join(arguments)}"
        folder, _ = machine.train(name, training, "workers", *arguments, launcher=WORKERS, logical=logical)
        return _compared(machine, folder, training, reference or training, ranks=2, facts=facts)

    return run


def _servers(machine: Machine) -> dict[str, Any]:
    launcher = ("--workers", "2", "--parameter-servers", "1")
    # The chief sees no GPU, and runs the program: its devices are CPUs, those of the workers are GPUs.
    folder, _ = machine.train("servers", "adam", "servers", launcher=launcher)
    return _compared(machine, folder, "adam", "adam")


def _model_parallel(strategy: str) -> Any:
    def run(machine: Machine) -> dict[str, Any]:
        folder, _ = machine.train(strategy, "adam", strategy, logical=2)
        return _compared(machine, folder, "adam", "adam")

    return run


def _compression(method: str) -> Any:
    """On two workers: the same weights on both, as on CPUs up to what the method rounds, and the bytes sent."""

    def run(machine: Machine) -> dict[str, Any]:
        name, argument = f"compression-{method.replace(':', '-')}", f"--compression={method}"
        folder, _ = machine.train(name, "compressed", "workers", argument, launcher=WORKERS)
        ours = outcomes.arrays_of(folder, "compressed")
        equal = outcomes.are_equal(ours, outcomes.arrays_of(folder, "compressed", 1), only="weight")
        row: dict[str, Any] = {"workers_equal": equal, "device": outcomes.facts_of(folder, "compressed")["device"][-5:]}
        cpu, _ = machine.train(f"{name}-cpu", "compressed", "workers", argument, launcher=WORKERS, kind="CPU")
        others = outcomes.arrays_of(cpu, "compressed")
        row["difference"] = outcomes.largest_difference(ours, others)
        losses = ours["log loss"], others["log loss"]
        row["loss"], row["loss_on_cpu"] = (float(values[-1]) for values in losses)
        row["ok"] = bool(equal and abs(row["loss"] - row["loss_on_cpu"]) <= 0.02 * row["loss_on_cpu"])
        sent = outcomes.facts_of(folder, "compressed")["sent"]
        if sent != outcomes.facts_of(cpu, "compressed")["sent"]:
            row["ok"], row["error"] = False, f"bytes sent: {sent}"
        return row

    return run


def _recovery(machine: Machine) -> dict[str, Any]:
    plain, _ = machine.train("recovery-undisturbed", "recovered", "workers", launcher=WORKERS)
    launcher = (*WORKERS, "--max-restarts", "2")
    killed, _ = machine.train(
        "recovery-killed", "recovered", "workers", f"--kill-at-step={_KILL_AT_STEP}", launcher=launcher
    )
    ours, expected = (outcomes.arrays_of(folder, "recovered") for folder in (killed, plain))
    attempt = outcomes.facts_of(killed, "recovered")["attempt"]
    equal = outcomes.are_equal(ours, outcomes.arrays_of(killed, "recovered", 1), only="weight")
    return {
        "ok": outcomes.are_equal(ours, expected) and equal and attempt == "1",
        "difference": outcomes.largest_difference(ours, expected),
        "workers_equal": equal,
        "attempt": attempt,
    }


def _elastic(*arguments: str, workers: int = 3, logical: int = 1) -> Any:
    """The last worker is lost and joins again while the others train: the numbers of one process."""

    def run(machine: Machine) -> dict[str, Any]:
        launcher = ("--workers", str(workers), "--elastic", "1")
        name = f"elastic-{workers}-{logical}{''.join(arguments)}"
        folder, _ = machine.train(name, "elastic", "workers", *arguments, launcher=launcher, logical=logical)
        row = _compared(machine, folder, "elastic", "elastic", ranks=workers)
        row["living"] = outcomes.facts_of(folder, "elastic")["living"]
        if row["living"] != [workers, workers - 1, workers]:
            row["ok"], row["error"] = False, f"so many trained, one after the other: {row['living']}"
        return row

    return run


def _checked_gradients(machine: Machine) -> dict[str, Any]:
    """Workers on one card, with TensorFloat-32 and kernels of any order: nobody's gradients are said to be wrong."""
    launcher, variables = (
        ("--workers", "3", "--elastic", "1"),
        {"NVIDIA_TF32_OVERRIDE": "1", "TF_DETERMINISTIC_OPS": "0"},
    )
    folder, _ = machine.train("checked", "elastic", "workers", "--check-gradients=0.5", launcher=launcher, **variables)
    facts = outcomes.facts_of(folder, "elastic")
    ours = outcomes.arrays_of(folder, "elastic")
    equal = all(
        outcomes.are_equal(ours, outcomes.arrays_of(folder, "elastic", rank), only="weight") for rank in range(1, 3)
    )
    row: dict[str, Any] = {"ok": facts["living"] == [3] and equal, "workers_equal": equal, "living": facts["living"]}
    row |= {"note": "nobody is accused", "expected": "nobody", "device": facts["device"][-5:]}
    if not row["ok"]:
        row["error"] = f"so many trained, one after the other: {facts['living']}; equal weights: {equal}"
    return row


def _nccl_of_one(machine: Machine) -> dict[str, Any]:
    may_fail = machine.kind == "CPU"
    folder, finished = machine.train(
        "nccl-1", "convolutions", "workers", "--nccl", launcher=("--workers", "1"), may_fail=may_fail
    )
    if may_fail and finished.code:
        return {"ok": True, "note": "an error, as there is no GPU", "message": finished.last_lines()}
    return _compared(machine, folder, "convolutions", "convolutions")


def _nccl_of_two(machine: Machine) -> dict[str, Any]:
    """Two workers: with a GPU each they must train, on one card it must be an error within the limit."""
    has_two = machine.kind == "GPU" and machine.gpus > 1
    arguments = ["--nccl", *(["--gpu-of-rank"] if has_two else [])]
    folder, finished = machine.train(
        "nccl-2", "convolutions", "workers", *arguments, launcher=WORKERS, may_fail=not has_two
    )
    if has_two or not finished.code:
        return _compared(machine, folder, "convolutions", "convolutions", ranks=2)
    note = "an error, as there is " + ("one card" if machine.kind == "GPU" else "no GPU")
    message = finished.last_lines()
    return {"ok": machine.kind == "CPU" or _REFUSED in message, "note": note, "message": message}


def _parity_suite(workers: int, logical: int) -> Any:
    """The cases of `tests/parity`, as far as they are named here."""

    def run(machine: Machine) -> dict[str, Any]:
        name = f"suite-{workers}-{logical}"
        output = machine.folder / f"{name}.json"
        start = [sys.executable]
        if workers > 1:
            start += ["-m", "tfdist.launch", "run", "--workers", str(workers)]
        command = [*start, str(ROOT / "tests" / "parity" / "run_cases.py"), _DEVICES_OF_PARITY[machine.kind]]
        command += [f"--devices={logical}", f"--output={output}", f"--references={machine.folder / name}"]
        command += [f"--cases={','.join(PARITY_CASES)}"]
        error = ""
        try:
            finished = finish(
                command,
                environment(uses_gpu=machine.kind == "GPU"),
                limit_seconds=_SUITE_FACTOR * machine.limit_seconds,
                may_fail=True,
            )
            error = finished.last_lines() if finished.code else ""
        except CaseError as late:
            error = str(late)
        found = json.loads(output.read_text()) if output.exists() else {}
        differences = {
            case: max(one.get("difference", np.inf), one.get("rank_difference", 0.0)) for case, one in found.items()
        }
        errors = {case: one["error"][-600:] for case, one in found.items() if "error" in one}
        missing = [case for case in PARITY_CASES if case not in found]
        largest = max(differences.values(), default=float("inf"))
        row: dict[str, Any] = {"ok": not (missing or errors or error) and largest <= 10 * outcomes.TOLERANCE}
        row |= {"difference": largest, "allowed": 10 * outcomes.TOLERANCE, "differences": differences}
        if missing or errors or error:
            row["error"] = f"missing: {missing}; {errors}; {error}"
        return row

    return run


REFERENCE_CASES = (Case("reference", references), Case("reference_cpu", references_on_cpu))
CASES = (
    Case("parity_replicas", _replicas("convolutions"), "convolutions"),
    Case("parity_workers", _workers("convolutions"), "convolutions"),
    Case("parity_workers_x2", _workers("convolutions", logical=2), "convolutions"),
    Case("parity_servers", _servers, "adam"),
    Case("suite_replicas", _parity_suite(1, 2)),
    Case("suite_workers", _parity_suite(2, 1)),
    Case("suite_workers_x2", _parity_suite(2, 2)),
    Case("mixed_float16_replicas", _replicas("mixed_float16"), "mixed_float16"),
    Case("mixed_float16_workers", _workers("mixed_float16"), "mixed_float16"),
    Case("overflow_replicas", _replicas("overflow", facts=("scales", "updates")), "overflow"),
    Case("overflow_workers", _workers("overflow", facts=("scales", "updates")), "overflow"),
    Case("mixed_bfloat16_replicas", _replicas("mixed_bfloat16"), "mixed_bfloat16"),
    Case("mixed_bfloat16_workers", _workers("mixed_bfloat16"), "mixed_bfloat16"),
    Case("jit_compile_replicas", _replicas("jit_compile", "convolutions"), "convolutions"),
    Case("jit_compile_workers", _workers("jit_compile", "convolutions"), "convolutions"),
    *(Case(f"compression_{method.partition(':')[0]}", _compression(method)) for method in METHODS),
    Case("recovery", _recovery),
    Case("elastic_workers", _elastic("--kill-at-step=20"), "elastic"),
    Case("elastic_workers_x2", _elastic("--kill-at-step=20", workers=2, logical=2), "elastic"),
    Case("elastic_flipped_bit", _elastic("--flip-at-step=20"), "elastic"),
    Case("elastic_checked_gradients", _checked_gradients),
    Case("sharded_state_replicas", _replicas("adam", None, "--sharded"), "adam"),
    Case("sharded_state_workers", _workers("adam", None, "--sharded"), "adam"),
    Case("pipeline", _model_parallel("pipeline"), "adam"),
    Case("tensor_parallel", _model_parallel("tensor"), "adam"),
    Case("nccl_one_worker", _nccl_of_one, "convolutions"),
    Case("nccl_two_workers", _nccl_of_two, "convolutions"),
)
