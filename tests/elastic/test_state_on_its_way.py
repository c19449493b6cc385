"""The state of a worker that trains does not hold up its steps on the way to another one."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from thread_workers import wait_until

from tfdist.checkpoint.shard import Shard
from tfdist.elastic.received_state import ReceivedState, encode_state
from tfdist.membership import state_transfer
from tfdist.recovery.training_state import Snapshot


def test_variables_are_copied_by_the_thread_that_sends_them() -> None:
    kernel, copies = np.zeros(3, np.float32), []

    def copy() -> None:
        copies.append(True)
        kernel[:] = [1, 2, 3]

    buffers = encode_state(Snapshot(Shard({"kernel": kernel}), Shard({}), None, copy), {"fits": 1})
    assert not copies, "the step would wait for it"
    received = ReceivedState([bytes(buffer) for buffer in buffers()], 2)
    np.testing.assert_array_equal(received.read_shared().tensors["kernel"], [1, 2, 3])


class _Connection:
    """Counts what is sent."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def send(self, message: Any) -> None:
        self.is_state = "results" not in message

    def send_data(self, data: memoryview, silence_seconds: float) -> None:
        del silence_seconds
        self.sizes.append(len(data))

    def detach(self) -> Any:
        raise OSError

    def close(self) -> None: ...


def test_only_the_state_leaves_the_link_to_others_for_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of steps grow in number until the worker that joins has all of them."""
    connection, pauses = _Connection(), []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pauses.append(connection.is_state))
    monkeypatch.setattr(state_transfer, "time", clock)
    monkeypatch.setattr(state_transfer, "_BLOCK_BYTES", 8)
    transfer = state_transfer._Transfer(connection)  # type: ignore[arg-type]
    transfer.put({"step": 1}, lambda: [np.zeros(2, np.int64)])
    transfer.put({"step": 2, "results": []}, lambda: [np.zeros(3, np.int64)])
    wait_until(lambda: len(connection.sizes) == 5, "both are sent")
    transfer.close()
    wait_until(lambda: transfer.has_ended, "it ends")
    assert pauses == [True, True]
