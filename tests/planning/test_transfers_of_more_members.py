"""Exchanges of any number of members, from measurements of two: what a call, a message and a byte cost."""

import pytest

from tfdist.planning.link_costs import TransferCosts
from tfdist.planning.measurements import EXCHANGE, GATHER, MESSAGE, SUM, TransferMeasurement
from tfdist.utils.sum_copies import SHORT_BYTES

CALL, PEER, BYTE = 3e-4, 2e-5, 1e-9


def seconds(kind: str, nbytes: float, members: int) -> float:
    """A machine on which a call costs `CALL`, a message to a member `PEER`, and each byte that is sent `BYTE`."""
    rounds, sent = (
        2 if kind == SUM else 1,
        {GATHER: members - 1, EXCHANGE: (members - 1) / members, SUM: 2 * (members - 1) / members}[kind] * nbytes,
    )
    if kind == SUM and nbytes * (members - 1) <= SHORT_BYTES:
        rounds, sent = 1, nbytes * (members - 1)  # to all others at once, who add it themselves
    return CALL + rounds * (members - 2) * PEER + BYTE * sent


SIZES = {SUM: (2**10, 2**18, 2**21, 2**24), GATHER: (2**10, 2**18, 2**21, 2**23), EXCHANGE: (2**10, 2**18, 2**22)}
COSTS = TransferCosts(
    tuple(
        TransferMeasurement(kind, nbytes, seconds(kind, nbytes, 2), seconds(kind, nbytes, 2) / 2)
        for kind, sizes in SIZES.items()
        for nbytes in sizes
    )
    + (TransferMeasurement(MESSAGE, 1024, PEER, PEER / 2),)
)


@pytest.mark.parametrize("members", [2, 3, 8, 64, 4096])
@pytest.mark.parametrize("nbytes", [8, 256, 3 * 10**5, 10**6, 10**8])
@pytest.mark.parametrize("kind", [SUM, GATHER, EXCHANGE])
def test_exchanges_of_any_number_of_members(kind: str, nbytes: int, members: int) -> None:
    assert COSTS.seconds(kind, nbytes, members) == pytest.approx(seconds(kind, nbytes, members))
    assert COSTS.core_seconds(kind, nbytes, members) == pytest.approx(seconds(kind, nbytes, members) / 2)


def test_one_member_exchanges_nothing() -> None:
    assert COSTS.seconds(SUM, 1e6, 1) == COSTS.core_seconds(GATHER, 1e6, 1) == 0.0
