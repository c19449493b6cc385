"""Plans as text: a table of the best, why each stands there, what it costs in exactness, and the lines that give it."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.planning.link_costs import LinkSpeed
from tfdist.planning.plan_code import start_command
from tfdist.planning.plans import Plan
from tfdist.utils.formatting import align_columns, counted, format_bytes, format_rate, format_seconds

_WIDTH = 116
_HEADINGS = ("", "plan", "step", "samples/s", "memory", "sent", "exact")
_SHOWN_TOO_LARGE = 4


def plan_name(plan: Plan) -> str:
    """Returns a short name of a plan.

    >>> from tfdist.planning.plans import PlannedStrategy
    >>> strategy = PlannedStrategy("MultiWorkerMirroredStrategy", {"compression": "int8", "micro_batches": 2})
    >>> plan_name(Plan(strategy, "int8", True, False, 2, 0, False, 0.1, 640.0, 10**9, 10**6, "", "", ""))
    'data parallel, int8, 2 micro-batches, XLA'
    """
    arguments = plan.strategy.arguments
    parts = [_kind(plan, arguments)]
    if plan.compression:
        parts.append(plan.compression)
    if arguments.get("shard_optimizer_state"):
        parts.append("sharded slots")
    if "micro_batches" in arguments:
        parts.append(f"{arguments['micro_batches']} micro-batches")
    if "bucket_bytes" in arguments:
        parts.append("one bucket")
    if "load_balancing" in arguments:
        parts.append("balanced rows")
    if plan.gradient_accumulation_steps > 1:
        parts.append(f"{plan.gradient_accumulation_steps} batches an update")
    if plan.jit_compile:
        parts.append("XLA")
    return ", ".join(parts)


def to_lines(
    plans: Sequence[Plan],
    too_large: Sequence[tuple[Plan, int]],
    *,
    rows: int,
    link: LinkSpeed | None,
    memory_bytes: int,
    shown: int = 10,
    script: str = "train.py",
    cluster: str = "",
) -> list[str]:
    """Returns the lines for one number of workers.

    `plans` fit, best first; those that are `too_large` are shown with their missing bytes. Without a `link` the workers
    are on one machine.
    """
    of_all = [*plans, *(plan for plan, _ in too_large)]
    workers = of_all[0].workers if of_all else 0
    connected = " on this machine"
    if link is not None:
        connected = f", each with {format_rate(link.bytes_per_second)} and {format_seconds(link.latency_seconds)}"
    best = plans[:shown]
    lines = [
        f"{counted(workers, 'worker')}{connected if workers > 1 else ''}; {counted(rows, 'sample')} in a step; "
        f"the best {len(best)} of {counted(len(of_all), 'plan')}",
        "",
    ]
    rank = range(1, len(best) + 1)
    lines += align_columns([_HEADINGS, *(_row(index, plan) for index, plan in zip(rank, best, strict=True))], left=[1])
    for index, plan in zip(rank, best, strict=True):
        lines += ["", *_details(index, plan, script, cluster)]
    if too_large:
        lines += ["", f"Do not fit into {format_bytes(memory_bytes)} of a worker:"]
        least: dict[str, tuple[Plan, int]] = {}
        for plan, missing in too_large:
            least.setdefault(f"{plan.strategy.name} {plan.strategy.arguments.get('mode')}", (plan, missing))
        named = list(least.values())[:_SHOWN_TOO_LARGE]
        lines += [f"  {plan_name(plan)}: {format_bytes(missing)} too much" for plan, missing in named]
        if len(too_large) > len(named):
            lines.append(f"  and {len(too_large) - len(named)} more")
    return lines


def _kind(plan: Plan, arguments: Mapping[str, Any]) -> str:
    if plan.strategy.name == "ParameterServerStrategy":
        mode = arguments["mode"]["class"].lower()
        return f"{counted(plan.parameter_servers, 'parameter server')}, {mode}"
    if plan.strategy.name == "ModelParallelStrategy":
        pipeline = arguments["pipeline"]["arguments"]
        name = counted(pipeline["stages"], "stage")
        if "data_parallel" in arguments:
            name += f" × {arguments['data_parallel']} columns"
        if "layout_map" in arguments:
            name += f" × {arguments['layout_map']['arguments']['ways']} ways"
        return f"{name}, {counted(pipeline['micro_batches'], 'micro-batch').replace('batchs', 'batches')}"
    if isinstance(arguments.get("mode"), Mapping):
        mode_arguments = arguments["mode"]["arguments"]
        overlap = ", overlapped" if mode_arguments.get("overlap_steps") else ""
        return f"{arguments['mode']['class']} every {mode_arguments['sync_every']}{overlap}"
    return "data parallel" if plan.workers > 1 else "one worker"


def _row(index: int, plan: Plan) -> tuple[str, ...]:
    return (
        f"{index}",
        plan_name(plan),
        format_seconds(plan.step_seconds),
        f"{plan.samples_per_second:,.0f}",
        format_bytes(plan.memory_bytes),
        format_bytes(plan.wire_bytes),
        "yes" if plan.exact else "no",
    )


def _details(index: int, plan: Plan, script: str, cluster: str) -> list[str]:
    def wrapped(text: str) -> list[str]:
        return textwrap.wrap(text, _WIDTH, initial_indent="   ", subsequent_indent="     ", break_long_words=False)

    lines = [f"{index}. {plan_name(plan)}", *wrapped(f"Why: {plan.reason}.")]
    lines += wrapped(f"Price: {plan.accuracy}.")
    lines += [f"     {line}" for line in plan.code.splitlines()]
    command = start_command(
        plan.workers, plan.parameter_servers, has_chief=plan.has_chief, script=script, cluster=cluster
    )
    return [*lines, f"     $ {command}"]
