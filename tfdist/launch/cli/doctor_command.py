"""`tfdist doctor`: checks a machine or a cluster before training."""

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tfdist import cluster
from tfdist.utils.argument_checks import UsageError, seconds, whole_number
from tfdist.utils.cores_and_ports import ReservedPorts, usable_cores
from tfdist.utils.formatting import counted

if TYPE_CHECKING:
    from tfdist.doctor.report import Finding

_ERRORS_EXIT_CODE = 1
HELP = "check a machine or a cluster before training"
DESCRIPTION = """\
Check this machine, or all machines of a cluster, before training: versions, devices, cores, memory, limits, host
names, ports, proxies, and the disk of the checkpoints. Between the tasks of a cluster: reachability, equal versions,
clocks, round trips, bandwidth, and the compression that these suggest.

Without a cluster this machine is checked. With a cluster (TF_CONFIG, srun, Kubernetes) start the command on every host
at the same time: the first task prints the report for all."""

EPILOG = """\
examples:
  tfdist doctor
  tfdist doctor --workers 2 --checkpoints checkpoints --parameters 25M
  srun --nodes 4 --ntasks 4 --ntasks-per-node 1 tfdist doctor --checkpoints /shared/run1
  TF_CONFIG=... tfdist doctor --json > report.json

Exit code: 0, with or without warnings; 1 if an error was found on any task; 2 for a usage error."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
_PARAMETERS = re.compile(r"(\d+(?:\.\d+)?)([kmgb]?)")


def execute(options: argparse.Namespace) -> int:
    """Runs the checks, prints the report, and returns the exit code. After a UsageError nothing was checked."""
    # Imported late: `tfdist run` does not need them.
    from tfdist.doctor.check_context import CheckContext, workers_on_own_host
    from tfdist.doctor.check_runner import run_checks
    from tfdist.doctor.local_cluster import local_cluster
    from tfdist.doctor.member_task import ReportSummary
    from tfdist.doctor.report import summary, to_text

    environ = dict(os.environ)
    config, findings = _described_cluster(environ)
    if options.workers is not None and (config or findings):
        source, remedy = _source_of_cluster(environ)
        raise UsageError(
            f"A cluster is described already. Received: --workers {options.workers}, and {source}. Expected: one of "
            f"them. Remove --workers to check that cluster, or {remedy}."
        )
    with contextlib.ExitStack() as until_the_end:
        if options.workers is not None and options.workers > 1:
            with ReservedPorts(options.workers) as reserved:
                ports = reserved.ports
            config = until_the_end.enter_context(local_cluster(ports, environ, options.timeout))
        is_address = options.checkpoints is not None and "://" in options.checkpoints
        context = CheckContext(
            environ,
            usable_cores(),
            config,
            workers=options.workers or (workers_on_own_host(config) if config else 1),
            parameters=options.parameters,
            checkpoints=None if is_address or options.checkpoints is None else Path(options.checkpoints),
            object_store=options.checkpoints if is_address else None,
            keep=options.keep,
        )
        result = run_checks(context, timeout_seconds=options.timeout, say=_say, findings=findings)
    if isinstance(result, ReportSummary):
        _say(f"{context.task}: {result.chief} has the report: {summary(result.errors, result.warnings)}")
    else:
        print(json.dumps(result.to_json(), indent=1) if options.json else to_text(result), flush=True)
    return _ERRORS_EXIT_CODE if result.errors else 0


def _source_of_cluster(environ: Mapping[str, str]) -> tuple[str, str]:
    """Returns what describes the cluster, and how to check this machine without it."""
    if cluster.has_tf_config(environ):
        return "TF_CONFIG", "unset TF_CONFIG"
    if cluster.is_kubernetes_cluster(environ):
        return "TFDIST_NUM_WORKERS or TFDIST_SERVICE", "unset both"
    return "a Slurm step of several tasks", "check one machine in a step of one task (srun --ntasks=1 --overlap)"


def _described_cluster(environ: Mapping[str, str]) -> "tuple[cluster.ClusterConfig | None, list[Finding]]":
    from tfdist.doctor.report import ERROR, OK, Finding

    try:
        config = cluster.detect(environ)
    except ValueError as error:
        remedy = "Correct the variable, or unset it to check this machine alone."
        return None, [Finding(ERROR, "cluster", str(error), remedy=remedy)]
    if config is not None:
        jobs = ", ".join(
            counted(len(addresses), "parameter server" if job == "ps" else job)
            for job, addresses in config.cluster.jobs.items()
        )
        return config, [Finding(OK, "cluster", f"{jobs}, as {config.source} says")]
    return None, []


def _say(text: str) -> None:
    print(f"tfdist doctor: {text}", file=sys.stderr, flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the sub-command `doctor`."""
    parser.add_argument(
        "--workers",
        type=whole_number(at_least=1, example=2),
        metavar="N",
        help="check this machine for N workers of tfdist run --workers N, and the connections between them",
    )
    parser.add_argument(
        "--parameters",
        type=parameters,
        default=10_000_000,
        metavar="P",
        help="number of parameters of the model, for example 25M or 1.5G; for memory, disk and compression "
        "(default: 10M)",
    )
    parser.add_argument(
        "--checkpoints", metavar="DIR", help="check the directory, or the address, that FailureRecovery will save to"
    )
    parser.add_argument(
        "--keep",
        type=whole_number(at_least=1, example=2),
        default=3,
        metavar="K",
        help="number of checkpoints that are kept there (default: 3)",
    )
    parser.add_argument(
        "--timeout",
        type=seconds(example=60),
        default=60.0,
        metavar="S",
        help="seconds to wait for the other tasks of the cluster (default: 60)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")


def parameters(text: str) -> int:
    """Parses a number of parameters.

    >>> parameters("25M"), parameters("1.5G"), parameters("1000")
    (25000000, 1500000000, 1000)
    """
    match = _PARAMETERS.fullmatch(text.strip().lower())
    number = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if number < 1:
        raise argparse.ArgumentTypeError(
            f"Invalid number. Received: {text!r}. Expected: a number of at least 1, optionally followed by k, M or G, "
            "for example 25M."
        )
    return number
