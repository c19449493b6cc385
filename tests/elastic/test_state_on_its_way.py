"""The state of a worker that trains does not hold up its steps on the way to another one."""

import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from thread_workers import wait_until

from tfdist.checkpoint.shard import Shard
from tfdist.elastic.received_state import ReceivedState, encode_state
from tfdist.membership import state_transfer
from tfdist.recovery.training_state import Snapshot
from tfdist.recovery.variable_copies import HostViews, host_view


@pytest.mark.usefixtures("cpus")
def test_the_memory_of_variables_is_sent_and_later_steps_leave_it_as_it_is() -> None:
    """The step would wait for a copy, which takes fresh memory."""
    variable = tf.Variable([1.0, 2.0, 3.0])
    memory = host_view(variable).ctypes.data
    kernel = HostViews().request("kernel", variable)
    buffers = encode_state(Snapshot(Shard({"kernel": kernel}), Shard({}), None, lambda: None), {"fits": 1})
    assert memory in [buffer.ctypes.data for buffer in buffers if isinstance(buffer, np.ndarray)]
    variable.assign_add([1.0, 1.0, 1.0])
    received = ReceivedState([bytes(buffer) for buffer in buffers], 2)
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
    state = [np.zeros(2, np.int64)]
    sent = weakref.ref(state[0])
    transfer.put({"step": 1}, state)
    del state
    wait_until(lambda: sent() is None, "the state is sent, and its memory is free")
    transfer.put({"step": 2, "results": []}, [np.zeros(3, np.int64)])
    wait_until(lambda: len(connection.sizes) == 5, "both are sent")
    transfer.close()
    wait_until(lambda: transfer.has_ended, "it ends")
    assert pauses == [True, True]
