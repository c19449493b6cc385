"""Every strategy of tfdist has the members of `TrainingStrategy`; other strategies are viewed through it."""

import json

import pytest
import tensorflow as tf

from tfdist import strategies
from tfdist.collectives import CommunicationStats
from tfdist.training.strategy_protocol import TrainingStrategy, is_tfdist_strategy, training_strategy

pytestmark = pytest.mark.usefixtures("cpus")
MEMBERS = ("replicas_of_workers", "communication")  # others have defaults
CLUSTER = {"worker": ["a:1", "b:1"], "chief": ["c:1"], "ps": ["d:1"]}


def resolver(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": {"type": "chief", "index": 0}}))
    return tf.distribute.cluster_resolver.TFConfigClusterResolver()


@pytest.mark.parametrize("name", ["MirroredStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy"])
def test_every_strategy_implements_all_members(name):
    strategy = getattr(strategies, name)
    for member in MEMBERS:
        implementation = getattr(strategy, member)
        assert implementation is not getattr(TrainingStrategy, member), f"{name}.{member} is missing"
        assert implementation.__doc__


def test_a_mirrored_strategy_is_its_own_view(cpus):
    strategy = strategies.MirroredStrategy(cpus[:2])
    assert is_tfdist_strategy(strategy) and training_strategy(strategy) is strategy
    assert (strategy.rank, strategy.num_workers, strategy.communication) == (0, 1, CommunicationStats())
    assert strategy.gradient_reduction is not None and strategy.worker_stats == ()


@pytest.mark.parametrize(
    "create",
    [
        tf.distribute.get_strategy,
        lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
        lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
    ],
    ids=["none", "mirrored", "one device"],
)
def test_other_strategies_of_one_process_have_rank_0_and_count_nothing(create):
    strategy = create()
    view = training_strategy(strategy)
    assert not is_tfdist_strategy(strategy)
    assert (view.rank, view.num_workers, view.communication) == (0, 1, CommunicationStats())
    assert (view.gradient_reduction, view.compression_state, view.worker_stats) == (None, None, ())


@pytest.mark.parametrize(("kind", "workers"), [("MultiWorkerMirroredStrategy", 3), ("ParameterServerStrategy", 2)])
def test_other_strategies_have_the_workers_of_their_cluster(monkeypatch, kind, workers):
    """The chief trains under MultiWorkerMirroredStrategy, and not under parameter servers."""
    stock = getattr(tf.distribute, kind)

    class Strategy(stock):
        def __init__(self):  # Nothing is connected.
            pass

        cluster_resolver = resolver(monkeypatch)

    assert training_strategy(Strategy()).num_workers == workers


def test_a_view_does_not_ask_the_cluster_resolver_for_the_rank():
    """The resolver of a TPU asks a service over the network, and callbacks create views often."""

    class Resolver:
        def cluster_spec(self):
            raise ValueError("asked")

    class Strategy(tf.distribute.OneDeviceStrategy):
        cluster_resolver = Resolver()

    view = training_strategy(Strategy("CPU:0"))
    assert (view.rank, view.communication, view.gradient_reduction) == (0, CommunicationStats(), None)
    with pytest.raises(ValueError, match="asked"):
        _ = view.num_workers
