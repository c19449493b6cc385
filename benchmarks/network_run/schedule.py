"""The order of the measurements: every variant in turn, again and again, so that all see the same machine."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from network_run.coordinator import Workers
from network_run.links import Network
from network_run.variants import LINKS, Variant

WARM_UP_STEPS = 6
_MIN_STEPS, _MAX_STEPS = 2, 10
# Slower steps than that are timed one at a time, and in fewer rounds.
_SLOW_SECONDS, _SLOW_ROUNDS = 5.0, 2
# A turn of faster steps than that begins with one that is not timed: the workers hear the order at different moments.
_LEAD_SECONDS = 2.0
# On a link that is busy for longer, the heartbeats of TensorFlow's coordination service come too late (10 s), and it
# ends the workers: stock TensorFlow as much as tfdist.
_LONGEST_EXCHANGE_SECONDS = 8.0
_TRANSFER_SECONDS = 1.0
_TRANSFER_BYTES_UNSHAPED = 1 << 28
# Ethernet, IPv4 and TCP with time stamps; a packet that the link has not cut up counts as one.
HEADER_BYTES = 66


@dataclass
class Samples:
    """What was seen of a variant on one link.

    Attributes:
      seconds: of each timed step of each worker.
      steps: how many steps the counts below belong to, timed or not.
      bytes: that a worker's interface sent, mean of the workers.
      packets: likewise.
      stated: sums of what the library said, mean of the workers.
    """

    seconds: list[float] = field(default_factory=list)
    steps: int = 0
    bytes: float = 0.0
    packets: float = 0.0
    stated: dict[str, float] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """What goes into the report: medians, quartiles, and counts for each step and worker."""
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
    """How long to measure.

    Attributes:
      rounds: how often each variant has its turn on a link.
      turn_seconds: how long a turn of fast steps is to take.
    """

    rounds: int = 3
    turn_seconds: float = 1.2

    def steps(self, step_seconds: float) -> int:
        """How many timed steps a turn has.

        >>> [Schedule().steps(seconds) for seconds in (0.01, 0.5, 1.5, 40.0)]
        [10, 2, 2, 1]
        """
        if step_seconds > _SLOW_SECONDS:
            return 1
        return min(_MAX_STEPS, max(_MIN_STEPS, int(self.turn_seconds / step_seconds)))


def warm_up(groups: Mapping[str, Workers], variants: Iterable[Variant], say: Callable[[str], None]) -> None:
    """Takes the first steps of all variants, on whatever the links are, and checks that the workers then agree.

    Raises:
      RuntimeError: workers that exchange gradients have different weights, or PowerSGD has not started.
    """
    for variant in variants:
        workers = groups[variant.framework]
        answers = workers.ask("run", variant=variant.name, steps=WARM_UP_STEPS)
        values = [answer["value"] for answer in workers.ask("fingerprint", variant=variant.name)]
        say(f"  warm-up {variant.name}: {sum(answers[0]['seconds']):.1f} s")
        if variant.sends and max(values) - min(values) > 1e-6 * max(values):
            raise RuntimeError(
                f"The workers of {variant.name!r} have different weights after {WARM_UP_STEPS} steps. "
                f"Received: sums of absolute values {values}. Expected: equal ones. The reduction is wrong."
            )
        if (answers[0]["stated"] or {}).get("is_active") is False:
            raise RuntimeError(
                f"{variant.name!r} does not compress yet. Received: {WARM_UP_STEPS} steps of warm-up. "
                "Expected: more than PyTorch's start_powerSGD_iter. Raise WARM_UP_STEPS."
            )


def measure(
    groups: Mapping[str, Workers],
    network: Network,
    variants: list[Variant],
    links: Iterable[str],
    schedule: Schedule,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measures the variants on each link.

    Args:
      groups: the workers of each framework, warmed up.
      network: whose links are shaped.
      variants: in the order of the turns.
      links: keys of `LINKS`.
      schedule: how long.
      say: shows a line of progress.

    Returns:
      By link: `achieved_bits_per_second` of a plain transfer, and `variants`: the summaries by name, without those
      whose exchange would keep this link busy for too long.
    """
    results: dict[str, Any] = {}
    wire_bytes: dict[str, float] = {}
    for link in links:
        rate = LINKS[link]
        network.shape(rate)
        achieved = _slowest_transfer(next(iter(groups.values())), len(network.addresses), rate)
        say(f"  {link}: {achieved / 1e6:.1f} Mbit/s reached")
        longest_bytes = _LONGEST_EXCHANGE_SECONDS * rate / 8 if rate else math.inf
        feasible = [variant for variant in variants if wire_bytes.get(variant.name, 0.0) <= longest_bytes]
        samples = _measure_link(groups, feasible, schedule, say)
        wire_bytes |= {name: of_variant.bytes / of_variant.steps for name, of_variant in samples.items()}
        results[link] = {
            "achieved_bits_per_second": achieved,
            "variants": {name: of_variant.summary() for name, of_variant in samples.items()},
        }
    network.shape(None)
    return results


def _slowest_transfer(workers: Workers, number: int, rate: int | None) -> float:
    size = int(rate / 8 * _TRANSFER_SECONDS) if rate else _TRANSFER_BYTES_UNSHAPED
    speeds = []
    for sender in range(number):
        receiver = (sender + 1) % number
        answers = workers.ask("transfer", sender=sender, receiver=receiver, size=size)
        speeds.append(answers[receiver]["bits_per_second"])
    return min(speeds)


def _measure_link(
    groups: Mapping[str, Workers], variants: list[Variant], schedule: Schedule, say: Callable[[str], None]
) -> dict[str, Samples]:
    samples = {variant.name: Samples() for variant in variants}
    step_seconds: dict[str, float] = {}
    slow_turns: dict[str, int] = {}
    for variant in variants:
        first = Samples()
        _take_turn(groups[variant.framework], variant, first, steps=1, lead=0)
        step_seconds[variant.name] = statistics.median(first.seconds)
        if step_seconds[variant.name] > _SLOW_SECONDS:
            samples[variant.name], slow_turns[variant.name] = first, 1
    for number in range(schedule.rounds):
        # Each round begins with another variant, so that none is always the one after a slow one.
        first_place = number * len(variants) // max(1, schedule.rounds)
        for variant in variants[first_place:] + variants[:first_place]:
            name = variant.name
            if name in slow_turns:
                slow_turns[name] += 1
                if slow_turns[name] > min(_SLOW_ROUNDS, schedule.rounds):
                    continue
            lead = int(step_seconds[name] < _LEAD_SECONDS)
            steps = schedule.steps(step_seconds[name])
            _take_turn(groups[variant.framework], variant, samples[name], steps=steps, lead=lead)
    for name, of_variant in samples.items():
        say(f"    {name}: {statistics.median(of_variant.seconds) * 1e3:.1f} ms")
    return samples


def _take_turn(workers: Workers, variant: Variant, samples: Samples, *, steps: int, lead: int) -> None:
    """Adds `steps` timed steps to `samples`, after `lead` others."""
    before = workers.ask("count")
    answers = workers.ask("run", variant=variant.name, steps=lead + steps)
    after = workers.ask("count")
    number = len(answers)
    samples.steps += lead + steps
    for kind in ("bytes", "packets"):
        sent = sum(late[kind] - early[kind] for early, late in zip(before, after, strict=True))
        setattr(samples, kind, getattr(samples, kind) + sent / number)
    for answer in answers:
        samples.seconds += answer["seconds"][lead:]
        for name, value in (answer["stated"] or {}).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                samples.stated[name] = samples.stated.get(name, 0.0) + value / number
