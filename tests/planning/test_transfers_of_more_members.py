"""Collectives of any number of members, from measurements of two: messages in turn, and what a call costs once."""

import pytest

from tfdist.planning.measurements import EXCHANGE, GATHER, SUM, TransferMeasurement
from tfdist.planning.transfer_costs import SHORT_BYTES, TransferCosts

CALL, MESSAGE, BYTE = 3e-3, 4e-4, 1e-9


def seconds(kind: str, nbytes: float, members: int) -> float:
    """A machine on which a call costs `CALL`, a message `MESSAGE`, and each of its bytes `BYTE`."""
    if kind == GATHER:
        return CALL + (members - 1) * (MESSAGE + BYTE * nbytes)
    if kind == EXCHANGE:
        return CALL + (members - 1) * (MESSAGE + BYTE * nbytes / members)
    if members == 2 and nbytes <= SHORT_BYTES:
        return seconds(GATHER, nbytes, 2)
    return CALL + 2 * (members - 1) * (MESSAGE + BYTE * nbytes / members)


SIZES = {SUM: (2**10, 2**18, 2**21, 2**24), GATHER: (2**10, 2**18, 2**21, 2**23), EXCHANGE: (2**10, 2**18, 2**22)}
COSTS = TransferCosts(
    tuple(
        TransferMeasurement(kind, nbytes, seconds(kind, nbytes, 2), seconds(kind, nbytes, 2) / 2)
        for kind, sizes in SIZES.items()
        for nbytes in sizes
    )
)


@pytest.mark.parametrize("members", [2, 3, 8, 64, 4096])
@pytest.mark.parametrize("nbytes", [8, 256, 3 * 10**5, 10**6, 10**8])
@pytest.mark.parametrize("kind", [SUM, GATHER, EXCHANGE])
def test_collectives_of_any_number_of_members(kind: str, nbytes: int, members: int) -> None:
    assert COSTS.seconds(kind, nbytes, members) == pytest.approx(seconds(kind, nbytes, members), rel=0.02)
    assert COSTS.core_seconds(kind, nbytes, members) == pytest.approx(seconds(kind, nbytes, members) / 2, rel=0.02)


def test_without_measured_gathers_a_call_counts_for_each_message() -> None:
    sums = TransferCosts(tuple(one for one in COSTS.measured if one.kind == SUM))
    assert sums.once("seconds") == 0.0
    assert sums.seconds(SUM, 2**21, 3) == pytest.approx(2 * sums.seconds(SUM, 2**22 / 3, 2))
