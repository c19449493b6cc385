"""Plans as text: a table of the best, why each stands there, what it costs in exactness, and the lines that give it."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.planning.link_costs import LinkSpeed
from tfdist.planning.plans import Plan, PlannedStrategy
from tfdist.utils.formatting import align_columns, counted, format_bytes, format_rate, format_seconds

_WIDTH = 116
_CODE_WIDTH = 112
_LAYOUT = "auto_layout"
_HEADINGS = ("", "plan", "step", "samples/s", "memory", "sent", "exact")
_SHOWN_TOO_LARGE = 4


def plan_name(plan: Plan) -> str:
    """Returns a short name of a plan.

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


def code_of(strategy: PlannedStrategy, *, jit_compile: bool | None = None, accumulated: int = 1) -> str:
    """Returns the lines to paste; without `jit_compile` it is as the program says.

    >>> from tfdist.planning.plans import planned_object
    >>> local = PlannedStrategy("MultiWorkerMirroredStrategy", {"mode": planned_object("LocalSGD", sync_every=20)})
    >>> print(code_of(local, jit_compile=True))
    from tfdist.strategies import LocalSGD, MultiWorkerMirroredStrategy
    strategy = MultiWorkerMirroredStrategy(mode=LocalSGD(sync_every=20))
    model.jit_compile = True  # after model.compile
    """
    classes = [value["class"] for value in strategy.arguments.values() if isinstance(value, Mapping)]
    names = sorted({strategy.name, *classes}, key=str.lower)
    lines = [f"from tfdist.strategies import {', '.join(names)}"]
    arguments = dict(strategy.arguments)
    if _LAYOUT in names:
        lines.append(f"layout_map = {_expression(arguments['layout_map'])}  # model: built before, without a strategy")
    shown = [f"{name}={name if name == 'layout_map' else _expression(value)}" for name, value in arguments.items()]
    lines.append(_wrapped_call(f"strategy = {strategy.name}({', '.join(shown)})"))
    if jit_compile is not None:
        lines.append(f"model.jit_compile = {jit_compile}  # after model.compile")
    if accumulated > 1:
        lines.append(f"model.optimizer.gradient_accumulation_steps = {accumulated}  # before the first step")
    return "\n".join(lines)


def start_command(
    workers: int, parameter_servers: int, *, has_chief: bool, script: str = "train.py", cluster: str = ""
) -> str:
    """Returns the command that starts the plan; `cluster` describes the workers' cluster, empty: they are on one host.

    >>> start_command(4, 1, has_chief=True)
    'tfdist run --workers 4 --parameter-servers 1 train.py'
    >>> start_command(2, 0, has_chief=True), start_command(1, 0, has_chief=False)
    ('tfdist run --chief --workers 2 train.py', 'python train.py')
    >>> start_command(2, 0, has_chief=False, cluster="Slurm")
    'srun --ntasks=2 python train.py'
    """
    if cluster and workers > 1 and not has_chief:
        start = f"srun --ntasks={workers} " if cluster == "Slurm" else ""
        return f"{start}python {script}" + ("" if start else "    # as every task of the cluster")
    if cluster and workers > 1:
        one_host = start_command(0, parameter_servers, has_chief=has_chief, script=script)
        return f"{one_host.replace('--workers 0', '--workers N')}    # on every host, with --nodes; N is its part"
    if parameter_servers:
        return f"tfdist run --workers {workers} --parameter-servers {parameter_servers} {script}"
    if workers == 1:
        return f"python {script}"
    return f"tfdist run {'--chief ' if has_chief else ''}--workers {workers} {script}"


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


def _wrapped_call(line: str) -> str:
    """Breaks a call over lines, outside of its strings."""
    parts = line.split('"')
    parts[1::2] = [text.replace(" ", "\0") for text in parts[1::2]]
    lines = textwrap.wrap(
        '"'.join(parts), _CODE_WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace("\0", " ")


def _expression(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_expression, value))}]"
    if not isinstance(value, Mapping):
        return json.dumps(value) if isinstance(value, str) else repr(value)
    arguments = ", ".join(f"{name}={_expression(argument)}" for name, argument in value["arguments"].items())
    if value["class"] == _LAYOUT:
        arguments = f"model, {arguments}"
    return f"{value['class']}({arguments})"
