"""Trainings whose checkpoints cannot be on several hosts, and where a worker is."""

from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfdist.recovery import host_meeting
from tfdist.recovery.host_meeting import check_strategy
from tfdist.recovery.worker_coordination import WorkerCoordination

pytestmark = pytest.mark.usefixtures("cpus")


def test_what_needs_a_shared_place_is_refused(monkeypatch):
    strategy = tf.distribute.get_strategy()
    check_strategy("shared=False", WorkerCoordination(0, 1), strategy)
    with pytest.raises(ValueError, match=r"Received: shared=False, and elastic training.* Leave shared out"):
        check_strategy("shared=False", object(), strategy)
    other = ["/job:worker/replica:0/task:1/device:CPU:0"]
    monkeypatch.setattr(host_meeting, "placed_devices", lambda strategy: other)
    with pytest.raises(ValueError, match="memory_every_steps=5, and a model on the devices of several workers"):
        check_strategy("memory_every_steps=5", WorkerCoordination(0, 1), strategy)


def test_a_worker_is_at_its_address():
    cluster = tf.train.ClusterSpec({"chief": ["a:1"], "worker": ["b:2", "[::1]:3"]})
    resolver = SimpleNamespace(cluster_spec=lambda: cluster, task_type="worker", task_id=1)
    met = []
    store = SimpleNamespace(meet=lambda messages, place, purpose: met.append((place.address, place.port, purpose)))
    host_meeting.meet(store, "disk", WorkerCoordination(2, 3), SimpleNamespace(cluster_resolver=resolver))
    host_meeting.meet(store, "disk", WorkerCoordination(0, 1), None)
    assert met == [("::1", 3, "disk"), ("", 0, "disk")]
