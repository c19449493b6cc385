"""The lines of a script that create a planned strategy."""

import json
import textwrap
from collections.abc import Mapping
from typing import Any

from tfdist.planning.plans import PlannedStrategy

_LAYOUT = "auto_layout"
_WIDTH = 112


def code_of(strategy: PlannedStrategy, *, jit_compile: bool | None = None, accumulated: int = 1) -> str:
    """Returns the lines to paste.

    Without `jit_compile` it is as the program says.

    >>> local = PlannedStrategy("MultiWorkerMirroredStrategy", {"mode": planned_object("LocalSGD", sync_every=20)})
    >>> print(code_of(local, jit_compile=True))
    from tfdist.strategies import LocalSGD, MultiWorkerMirroredStrategy
    strategy = MultiWorkerMirroredStrategy(mode=LocalSGD(sync_every=20))
    model.jit_compile = True  # after model.compile
    """
    names = sorted({strategy.name, *_classes(strategy.arguments)}, key=str.lower)
    lines = [f"from tfdist.strategies import {', '.join(names)}"]
    arguments = dict(strategy.arguments)
    if _LAYOUT in names:
        lines.append(f"layout_map = {_expression(arguments['layout_map'])}  # model: built before, without a strategy")
    shown = [f"{name}={name if name == 'layout_map' else _expression(value)}" for name, value in arguments.items()]
    lines.append(_wrapped(f"strategy = {strategy.name}({', '.join(shown)})"))
    if jit_compile is not None:
        lines.append(f"model.jit_compile = {jit_compile}  # after model.compile")
    if accumulated > 1:
        lines.append(f"model.optimizer.gradient_accumulation_steps = {accumulated}  # before the first step")
    return "\n".join(lines)


def planned_object(name: str, **arguments: Any) -> dict[str, Any]:
    """Returns an argument that is an object of `tfdist.strategies`; see `PlannedStrategy.arguments`.

    >>> planned_object("LocalSGD", sync_every=20)
    {'class': 'LocalSGD', 'arguments': {'sync_every': 20}}
    """
    return {"class": name, "arguments": arguments}


def start_command(
    workers: int, parameter_servers: int, *, has_chief: bool, script: str = "train.py", cluster: str = ""
) -> str:
    """Returns the command that starts the plan.

    `cluster` describes the cluster whose tasks the workers are; empty: they are on one host.

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


def _wrapped(line: str) -> str:
    """Breaks a call over lines, outside of its strings."""
    parts = line.split('"')
    parts[1::2] = [text.replace(" ", "\0") for text in parts[1::2]]
    lines = textwrap.wrap(
        '"'.join(parts), _WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
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


def _classes(arguments: Mapping[str, Any]) -> list[str]:
    return [value["class"] for value in arguments.values() if isinstance(value, Mapping)]
