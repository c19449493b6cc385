"""Formats the results as Markdown tables, and compares them with the bars."""

from collections.abc import Iterator
from typing import Any

from network_run.bars import Bar
from network_run.variants import UNSHAPED

from model_parallel_run.pipeline_variants import BY_NAME, JAX, STAGED, WORKLOADS

_NOISE = 0.03  # of comparisons with other programs
_FIRST_STAGE, _LAST_STAGE = 0.75, 0.5  # of GPipe's peak, with four stages and eight micro-batches


def markdown(results: dict[str, Any]) -> str:
    """Returns a table of each workload, one of memory and one of the bars.

    Args:
        results: As `benchmarks/model_parallel.py` writes them.
    """
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    parts = [
        f"2 workers on {machine['cores']} cores of {machine['cpu']}; {versions}. Medians of a step, in milliseconds, "
        "with quartiles; megabytes that a worker sends per step, without headers.\n"
    ]
    for name, of_workload in results.get("workloads", {}).items():
        parts.append(_table(_step_rows(name, of_workload)))
    if "memory" in results:
        parts += [_memory_heading(results["memory"]), _table(_memory_rows(results["memory"]))]
    rows = [["bar", "where", "required", "measured", "reached"], ["---", "---", "---:", "---:", "---"]]
    for bar in all_bars(results):
        measured, reached = f"{bar.measured:.2f}", "yes" if bar.is_reached else "no"
        rows.append([bar.what, bar.where, f"≤ {bar.required:.2f}", measured, reached])
    return "\n".join([*parts, _table(rows)])


def all_bars(results: dict[str, Any]) -> Iterator[Bar]:
    """Yields the bars that the results allow to decide.

    >>> seconds = {"tfdist 1f1b": 1.1, "tfdist gpipe": 1.2, "torch 1f1b": 1.0, "torch gpipe": 1.5}
    >>> variants = {name: {"median_seconds": one} for name, one in seconds.items()}
    >>> [(bar.what, round(bar.measured, 2), bar.is_reached) for bar in all_bars(
    ...     {"workloads": {"mlp": {"links": {"unshaped": {"variants": variants}}}}})]
    [('1f1b / PyTorch', 1.1, False), ('gpipe / PyTorch', 0.8, True)]
    """
    for name, of_workload in results.get("workloads", {}).items():
        for link, of_link in of_workload["links"].items():
            seconds = {variant: one["median_seconds"] for variant, one in of_link["variants"].items()}
            for variant in [BY_NAME[one] for one in seconds]:
                for peer in [one for one in variant.peers if one in seconds and variant.schedule]:
                    framework = "Keras on JAX" if BY_NAME[peer].framework == JAX else "PyTorch"
                    ratio = seconds[variant.name] / seconds[peer]
                    yield Bar(f"{variant.schedule} / {framework}", f"{name}, {link}", 1.0, ratio, noise=_NOISE)
    if "memory" in results:
        ours = [results["memory"][f"tfdist {schedule}"] for schedule in ("1f1b", "gpipe")]
        for stage, where, required in ((0, "first stage", _FIRST_STAGE), (-1, "last stage", _LAST_STAGE)):
            yield Bar("peak of 1f1b / of gpipe", where, required, ours[0][stage] / ours[1][stage])


def _step_rows(name: str, of_workload: dict[str, Any]) -> Iterator[list[str]]:
    links = of_workload["links"]
    counted = (links.get(UNSHAPED) or next(iter(links.values())))["variants"]
    yield [f"{WORKLOADS[name].title}, {of_workload['parameters'] / 1e6:.1f} M parameters", "MB per step", *links]
    yield ["---"] + ["---:"] * (1 + len(links))
    for variant in counted:
        summaries = [of_link["variants"].get(variant) for of_link in links.values()]
        sent = f"{counted[variant]['payload_bytes'] / 1e6:.2f}"
        yield [variant, sent, *(_milliseconds(one) if one else "not measured" for one in summaries)]


def _memory_heading(memory: dict[str, list[int]]) -> str:
    stages = len(next(iter(memory.values())))
    return f"By how many megabytes the memory of a stage's process grows in a step; {stages} stages:\n"


def _memory_rows(memory: dict[str, list[int]]) -> Iterator[list[str]]:
    count = len(next(iter(memory.values())))
    yield ["", *(f"stage {stage}" for stage in range(count))]
    yield ["---"] + ["---:"] * count
    for name in STAGED:
        yield [name, *(f"{grown / 1e6:.0f}" for grown in memory[name])]


def _milliseconds(summary: dict[str, Any]) -> str:
    low, high = (f"{seconds * 1e3:.0f}" for seconds in summary["quartiles_seconds"])
    return f"{summary['median_seconds'] * 1e3:.0f} ({low}–{high})"


def _table(rows: Any) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
