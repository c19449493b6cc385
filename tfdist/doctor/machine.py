"""All checks of this machine."""

from collections.abc import Callable, Sequence

from tfdist.doctor.checkpoint_directory import check_checkpoints
from tfdist.doctor.finding import WARNING, Finding
from tfdist.doctor.libraries import check_libraries, check_python
from tfdist.doctor.names import check_own_address, check_own_name
from tfdist.doctor.proxy import check_proxy
from tfdist.doctor.resources import check_cores, check_memory, check_open_files, check_shared_memory
from tfdist.doctor.situation import Situation
from tfdist.doctor.tensorflow_start import check_tensorflow_start

Check = Callable[[Situation], list[Finding]]
CHECKS: tuple[Check, ...] = (
    check_python,
    check_libraries,
    check_tensorflow_start,
    check_cores,
    check_memory,
    check_open_files,
    check_shared_memory,
    check_own_name,
    check_own_address,
    check_proxy,
    check_checkpoints,
)


def check_machine(situation: Situation, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Runs the checks of this machine, one after another.

    Args:
        situation: What they are told.
        checks: The checks. One that fails itself becomes a finding.
    """
    findings = []
    for check in checks:
        try:
            findings += check(situation)
        except (OSError, ValueError) as error:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            remedy = "Look at it by hand: this system does not let the check look."
            findings.append(Finding(WARNING, name, f"the check failed: {error}", "an answer", remedy))
    return [finding.on(situation.task) for finding in findings]
