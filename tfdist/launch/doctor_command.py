"""`tfdist doctor`: checks a machine or a cluster before training."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tfdist import cluster
from tfdist.doctor.options import add_doctor_parser
from tfdist.launch.cores import usable_cores
from tfdist.launch.errors import UsageError
from tfdist.launch.ports import ReservedPorts

if TYPE_CHECKING:
    from tfdist.doctor.finding import Finding

_ERRORS_EXIT_CODE = 1


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the sub-command `doctor`."""
    add_doctor_parser(commands).set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Examines, prints the report, and returns the exit code: 1 if an error was found, on any task.

    Raises:
        UsageError: If the command is wrong. Nothing was looked at then.
    """
    # Not at the top: `tfdist run` does without.
    from tfdist.doctor.examination import examine
    from tfdist.doctor.local_peers import local_cluster
    from tfdist.doctor.member import Verdict
    from tfdist.doctor.situation import Situation, workers_on_own_host
    from tfdist.doctor.text import summary, to_text

    environ = dict(os.environ)
    config, findings = _described_cluster(environ)
    if options.workers is not None and (config or findings):
        raise UsageError(
            f"A cluster is described already. Received: --workers {options.workers}, and TF_CONFIG, Slurm's or "
            "Kubernetes' variables. Expected: one of them. Leave --workers out, or unset TF_CONFIG."
        )
    with contextlib.ExitStack() as until_the_end:
        if options.workers is not None and options.workers > 1:
            with ReservedPorts(options.workers) as reserved:
                ports = reserved.ports
            config = until_the_end.enter_context(local_cluster(ports, environ, options.timeout))
        situation = Situation(
            environ,
            usable_cores(),
            config,
            workers=options.workers or (workers_on_own_host(config) if config else 1),
            parameters=options.parameters,
            checkpoints=options.checkpoints,
            keep=options.keep,
        )
        result = examine(situation, timeout_seconds=options.timeout, say=_say, findings=findings)
    if isinstance(result, Verdict):
        _say(f"{situation.task}: {result.conductor} has the report: {summary(result.errors, result.warnings)}")
    else:
        print(json.dumps(result.to_json(), indent=1) if options.json else to_text(result), flush=True)
    return _ERRORS_EXIT_CODE if result.errors else 0


def _described_cluster(environ: Mapping[str, str]) -> "tuple[cluster.ClusterConfig | None, list[Finding]]":
    from tfdist.doctor.finding import ERROR, OK, Finding

    try:
        config = cluster.detect(environ)
    except ValueError as error:
        remedy = "Correct the variable, or unset it to check this machine alone."
        return None, [Finding(ERROR, "cluster", str(error), remedy=remedy)]
    if config is not None:
        jobs = ", ".join(_counted(len(addresses), job) for job, addresses in config.cluster.jobs.items())
        return config, [Finding(OK, "cluster", f"{jobs}, as {config.source} says")]
    return None, []


def _counted(count: int, job: str) -> str:
    name = "parameter server" if job == "ps" else job
    return f"{count} {name}{'' if count == 1 else 's'}"


def _say(text: str) -> None:
    print(f"tfdist doctor: {text}", file=sys.stderr, flush=True)
