"""Schedules the measurements: the variants take turns in rounds, so that all run under the same conditions."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from network_run.links import Network
from network_run.variants import LINKS, Variant
from network_run.worker_processes import WorkerProcesses

WARM_UP_STEPS = 6
_MIN_STEPS, _MAX_STEPS = 2, 10
# Slower steps, which the link limits, vary little: they are timed one at a time, in fewer rounds.
_SLOW_SECONDS, _SLOW_ROUNDS = 1.0, 2
# A turn of faster steps starts with an untimed step, as the workers receive the call at different times.
_LEAD_SECONDS = 1.0
# If a link is busy for longer, heartbeats of TensorFlow's coordination service are late (limit: 10 s), and it ends the
# workers, with stock TensorFlow as with tfdist.
_LONGEST_EXCHANGE_SECONDS = 8.0
_TRANSFER_SECONDS = 1.0
_TRANSFER_BYTES_UNSHAPED = 1 << 28
# Ethernet, IPv4 and TCP with time stamps. A packet counts once, even if the link splits it.
HEADER_BYTES = 66


@dataclass
class Samples:
    """The measurements of a variant on one link.

    Attributes:
        seconds: Of each timed step of each worker.
        steps: Number of steps in the counts below, including untimed ones.
        bytes: Sent by a worker's interface, mean over the workers.
        packets: Likewise.
        stated: Traffic that the library reports, mean over the workers.
    """

    seconds: list[float] = field(default_factory=list)
    steps: int = 0
    bytes: float = 0.0
    packets: float = 0.0
    stated: dict[str, float] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Returns medians, quartiles, and counts per step and worker."""
        quartiles = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return {
            "median_seconds": statistics.median(self.seconds),
            "quartiles_seconds": [quartiles[0], quartiles[2]],
            "samples": len(self.seconds),
            "wire_bytes": self.bytes / self.steps,
            "payload_bytes": (self.bytes - HEADER_BYTES * self.packets) / self.steps,
            "stated": {name: value / self.steps for name, value in self.stated.items()},
        }


@dataclass(frozen=True)
class Schedule:
    """Duration of the measurements.

    Attributes:
        rounds: Turns of each variant on a link.
        turn_seconds: Target duration of a turn with fast steps.
    """

    rounds: int = 3
    turn_seconds: float = 1.2

    def steps(self, step_seconds: float) -> int:
        """Returns the number of timed steps in a turn.

        >>> [Schedule().steps(seconds) for seconds in (0.01, 0.2, 0.9, 40.0)]
        [10, 6, 2, 1]
        """
        if step_seconds > _SLOW_SECONDS:
            return 1
        return min(_MAX_STEPS, max(_MIN_STEPS, int(self.turn_seconds / step_seconds)))


def warm_up(groups: Mapping[str, WorkerProcesses], variants: Iterable[Variant], log: Callable[[str], None]) -> None:
    """Runs the first steps of all variants and checks that the workers then have the same weights.

    Raises:
        RuntimeError: Workers that exchange gradients have different weights, or PowerSGD does not compress yet.
    """
    for variant in variants:
        workers = groups[variant.processes]
        answers = workers.call("run", variant=variant.name, steps=WARM_UP_STEPS)
        values = [answer["value"] for answer in workers.call("fingerprint", variant=variant.name)]
        log(f"  warm-up {variant.name}: {sum(answers[0]['seconds']):.1f} s")
        if variant.sends and max(values) - min(values) > 1e-6 * max(values):
            raise RuntimeError(
                f"The workers of {variant.name!r} have different weights after {WARM_UP_STEPS} steps. "
                f"Received: sums of absolute values {values}. Expected: equal sums. The reduction is wrong."
            )
        if (answers[0]["stated"] or {}).get("is_active") is False:
            raise RuntimeError(
                f"{variant.name!r} does not compress yet. Received: {WARM_UP_STEPS} steps of warm-up. "
                "Expected: more than PyTorch's start_powerSGD_iter. Raise WARM_UP_STEPS."
            )


def measure(
    groups: Mapping[str, WorkerProcesses],
    network: Network,
    variants: list[Variant],
    links: Iterable[str],
    schedule: Schedule,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Measures the variants on each link.

    Args:
        groups: Workers by `Variant.processes`, after the warm-up.
        network: Its links are shaped.
        variants: In the order of the turns.
        links: Keys of `LINKS`.
        schedule: Duration.
        log: Prints a line of progress.

    Returns:
        By link: `achieved_bits_per_second` of a plain transfer, and `variants`, the summaries by name. Variants whose
        exchange would keep the link busy for too long are left out.
    """
    results: dict[str, Any] = {}
    wire_bytes: dict[str, float] = {}
    for link in links:
        rate = LINKS[link]
        network.shape(rate)
        achieved = _slowest_transfer(next(iter(groups.values())), len(network.addresses), rate)
        log(f"  {link}: {achieved / 1e6:.1f} Mbit/s reached")
        longest_bytes = _LONGEST_EXCHANGE_SECONDS * rate / 8 if rate else math.inf
        feasible = [variant for variant in variants if wire_bytes.get(variant.name, 0.0) <= longest_bytes]
        feasible = [variant for variant in feasible if rate is None or not variant.shares_memory]
        samples = _measure_link(groups, feasible, schedule, log)
        wire_bytes |= {name: of_variant.bytes / of_variant.steps for name, of_variant in samples.items()}
        results[link] = {
            "achieved_bits_per_second": achieved,
            "variants": {name: of_variant.summary() for name, of_variant in samples.items()},
        }
    network.shape(None)
    return results


def _slowest_transfer(workers: WorkerProcesses, number: int, rate: int | None) -> float:
    size = int(rate / 8 * _TRANSFER_SECONDS) if rate else _TRANSFER_BYTES_UNSHAPED
    speeds = []
    for sender in range(number):
        receiver = (sender + 1) % number
        answers = workers.call("transfer", sender=sender, receiver=receiver, size=size)
        speeds.append(answers[receiver]["bits_per_second"])
    return min(speeds)


def _measure_link(
    groups: Mapping[str, WorkerProcesses], variants: list[Variant], schedule: Schedule, log: Callable[[str], None]
) -> dict[str, Samples]:
    samples = {variant.name: Samples() for variant in variants}
    step_seconds: dict[str, float] = {}
    slow_turns: dict[str, int] = {}
    for variant in variants:
        first = Samples()
        _take_turn(groups[variant.processes], variant, first, steps=1, lead=0)
        step_seconds[variant.name] = statistics.median(first.seconds)
        if step_seconds[variant.name] > _SLOW_SECONDS:
            samples[variant.name], slow_turns[variant.name] = first, 1
    for number in range(schedule.rounds):
        # Each round starts with another variant, so that no variant always follows a slow one.
        first_place = number * len(variants) // max(1, schedule.rounds)
        for variant in variants[first_place:] + variants[:first_place]:
            name = variant.name
            if name in slow_turns:
                slow_turns[name] += 1
                if slow_turns[name] > min(_SLOW_ROUNDS, schedule.rounds):
                    continue
            lead = int(step_seconds[name] < _LEAD_SECONDS)
            steps = schedule.steps(step_seconds[name])
            _take_turn(groups[variant.processes], variant, samples[name], steps=steps, lead=lead)
    for name, of_variant in samples.items():
        log(f"    {name}: {statistics.median(of_variant.seconds) * 1e3:.1f} ms")
    return samples


def _take_turn(workers: WorkerProcesses, variant: Variant, samples: Samples, *, steps: int, lead: int) -> None:
    """Runs `lead` untimed steps, then adds `steps` timed steps to `samples`."""
    before = workers.call("count")
    answers = workers.call("run", variant=variant.name, steps=lead + steps)
    after = workers.call("count")
    number = workers.links
    samples.steps += lead + steps
    for kind in ("bytes", "packets"):
        sent = sum(late[kind] - early[kind] for early, late in zip(before, after, strict=True))
        setattr(samples, kind, getattr(samples, kind) + sent / number)
    for answer in answers:
        samples.seconds += answer["seconds"][lead:]
        for name, value in (answer["stated"] or {}).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                samples.stated[name] = samples.stated.get(name, 0.0) + value / number
