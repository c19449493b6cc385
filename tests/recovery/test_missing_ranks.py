"""Checkpoints in which the parts of some ranks are missing, restored on all."""

from types import SimpleNamespace

import numpy as np
import pytest
from test_resharding import model, train
from trainings import SPEC

from tfdist.checkpoint import Shard
from tfdist.recovery.resharding import group_by_variable, is_replica_name
from tfdist.recovery.trained_model import TrainedModel
from tfdist.recovery.training_state import state_of_fit
from tfdist.recovery.variable_snapshots import VariableSnapshots
from tfdist.strategies.replicated_strategy import ReplicatedStrategy
from tfdist.training.metric_totals import MetricTotals

pytestmark = pytest.mark.usefixtures("cpus")
_DEVICES = 2


def _saved_by_last_of_three(trained):
    """What three workers of two devices have saved of which two were lost: all sums were with the last one."""
    snapshot = state_of_fit(trained, [], SPEC, timeout_seconds=1.0).snapshot({}, is_chief=True)
    snapshot.finish()

    def moved(name):
        key, _, replica = name.rpartition("@")
        return f"{key}@{int(replica) + 2 * _DEVICES}"

    tensors = {moved(name): value.copy() for name, value in snapshot.rank.tensors.items()}
    assert all(map(is_replica_name, tensors))
    shared = Shard(dict(snapshot.shared.tensors), dict(snapshot.shared.metadata))
    description = {**shared.metadata["description"], "replicas": 3 * _DEVICES, "compressing_replicas": 3 * _DEVICES}
    shared.metadata["description"] = description
    ranks = {2: Shard(tensors, snapshot.rank.metadata)}
    return SimpleNamespace(num_ranks=3, saved_ranks=(2,), read_shared=lambda: shared, read_rank=ranks.__getitem__)


def test_what_was_added_up_stays_and_what_was_equal_is_copied(cpus, monkeypatch):
    old, new = model(cpus, 2, compression="powersgd:1"), model(cpus, 2, compression="powersgd:1")
    train(old, 0, 72)
    before = group_by_variable(VariableSnapshots(TrainedModel(old)).per_replica())
    totals = MetricTotals()
    monkeypatch.setattr(ReplicatedStrategy, "metric_totals", property(lambda self: totals))
    state_of_fit(new, [], SPEC, timeout_seconds=1.0).restore(_saved_by_last_of_three(old), 0, 1, metrics=True)
    after = group_by_variable(VariableSnapshots(TrainedModel(new)).per_replica())
    assert before.keys() == after.keys()
    for name, values in before.items():
        if name.startswith(("accumulators/", "metrics/")) or name.endswith("residual"):
            assert np.any(sum(values.values())), name
            # Numbers of about 1, added up in another order.
            np.testing.assert_allclose(sum(after[name].values()), sum(values.values()), atol=1e-6, err_msg=name)
        else:
            for value in after[name].values():
                np.testing.assert_array_equal(value, values[0], name)
    # Another worker may be lost before the next step: each has the sums of all.
    counted = [sum(values.values()) for name, values in before.items() if name.startswith("metrics/")]
    assert len(totals.variables) == len(counted) > 0
    for total, expected in zip(totals.variables, counted, strict=True):
        np.testing.assert_array_equal(total.numpy(), expected)
