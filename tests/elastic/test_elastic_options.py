"""What does not work with `elastic` is refused, row by row of the table in `docs/elastic.md`."""

import re
from pathlib import Path
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

from tfdist.callbacks import FailureRecovery, SpikeGuard
from tfdist.elastic.elastic_fit import reject_backups
from tfdist.elastic.step_variables import check_updates
from tfdist.launch.cli.main import main
from tfdist.strategies import DiLoCo, MultiWorkerMirroredStrategy, exchange_start
from tfdist.strategies.elastic_training import ElasticTraining, check_elastic_options

pytestmark = pytest.mark.usefixtures("cpus")

_PAGE = Path(__file__).parents[2] / "docs" / "elastic.md"
_NCCL = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.NCCL
)


def _strategy(**options):
    MultiWorkerMirroredStrategy(elastic=True, **options)


def _training(**attributes):
    training = object.__new__(ElasticTraining)
    vars(training).update(attributes)
    return training


def _custom_loop(_):
    _training(_transactions=SimpleNamespace(is_running=False)).check_runs_in_step()


def _local_loop(_):
    strategy = SimpleNamespace(local_updates=object())
    _training(_strategy=lambda: strategy, _transactions=None).loop_member([])


def _own_data(_):
    strategy = object.__new__(MultiWorkerMirroredStrategy)
    vars(strategy).update(row_shares=object())
    strategy.distribute_datasets_from_function(lambda context: tf.data.Dataset.range(3))


def _two_optimizers(made):
    """Accumulations over 4 and 6 steps, the second of which has `made` some when the first one begins."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(gradient_accumulation_steps=4), "mse")
    model.other = keras.optimizers.SGD(gradient_accumulation_steps=6)
    model.other._iterations.assign_add(made)
    return model


def _never_in_one_step(_):
    _training().step_function(_two_optimizers(made=3), "train", lambda iterator: None)


def _compiled_part(_):
    part = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    part.compile("sgd", "mse")
    model = keras.Sequential([keras.Input((1,)), part])
    model.compile("sgd", "mse")
    _training().step_function(model, "train", lambda iterator: None)


def _goes_back(_):
    strategy = object.__new__(MultiWorkerMirroredStrategy)
    vars(strategy).update(_elastic=object(), _extended=None)
    guard = SpikeGuard(go_back_steps=100)
    guard.set_model(SimpleNamespace(distribute_strategy=strategy))
    guard.on_train_begin()


# By the row of the table: what is refused, and what the message says.
_REFUSED = {
    "`strategy.run` outside of the steps of Keras and `ElasticLoop`": (
        _custom_loop,
        "Received: `strategy.run` outside",
    ),
    "`distribute_datasets_from_function`": (_own_data, "`load_balancing`, `shares` and `elastic`"),
    "`shard_weights=True`": (
        lambda _: _strategy(shard_weights=True),
        "`shard_weights` does not work with `elastic`: the parts of a lost worker would be lost",
    ),
    "`shard_optimizer_state=True`": (
        lambda _: _strategy(shard_optimizer_state=True),
        "`shard_optimizer_state` does not work with `elastic`: the parts of a lost worker would be lost",
    ),
    "`DiLoCo(overlap_steps=10)`": (
        lambda _: _strategy(mode=DiLoCo(sync_every=20, overlap_steps=10)),
        "Received: overlap_steps=10",
    ),
    "ElasticLoop with `LocalSGD` or `DiLoCo`": (_local_loop, "Received: an ElasticLoop under a strategy with"),
    "optimizers that accumulate and never update in one step": (
        _never_in_one_step,
        "Received: .* over 4 and 6 micro-steps, and have made 0 and 3",
    ),
    "compiled models within the model": (_compiled_part, "a compiled model within the model that is trained"),
    "workers with different numbers of devices": (
        lambda _: ElasticTraining(SimpleNamespace(replicas_of_workers=(1, 2))),
        r"Received: \[1, 2\] devices, by rank",
    ),
    "`BackupAndRestore`": (
        lambda folder: reject_backups([FailureRecovery(folder), keras.callbacks.BackupAndRestore(folder)]),
        "Received: BackupAndRestore in the callbacks",
    ),
    "`SpikeGuard(go_back_steps=100)`": (_goes_back, "Received: go_back_steps=100, under a strategy with `elastic`"),
    "NCCL": (lambda _: check_elastic_options(communication_options=_NCCL), "NCCL has a fixed group of workers"),
}
_REFUSED_BY_THE_COMMAND = "`--elastic MIN:MAX` with `--nodes`"


def test_the_table_of_the_page_names_what_is_refused():
    rows = re.findall(r"^\| ([^|]+) \| error \|", _PAGE.read_text(), re.MULTILINE)
    assert sorted(row.split(",")[0] for row in rows) == sorted([*_REFUSED, _REFUSED_BY_THE_COMMAND])


@pytest.mark.parametrize("row", _REFUSED)
def test_it_is_refused_with_what_to_do(row, tmp_path):
    refused, message = _REFUSED[row]
    with pytest.raises(ValueError, match=message) as raised:
        refused(str(tmp_path))
    assert "Expected: " in str(raised.value)


def test_optimizers_that_update_in_one_step_now_and_then_may_accumulate():
    check_updates(_two_optimizers(made=0))
    check_updates(_two_optimizers(made=2))


def test_a_callback_of_the_program_that_restores_backups_is_refused(tmp_path):
    class Own(keras.callbacks.BackupAndRestore):
        pass

    with pytest.raises(ValueError, match="Received: Own in the callbacks"):
        reject_backups([Own(str(tmp_path))])


def test_the_command_refuses_to_grow_on_several_hosts(capsys):
    assert main(["run", "--workers", "2", "--elastic", "1:4", "--nodes", "2", __file__]) == 2
    assert "The number of workers grows on one host only" in capsys.readouterr().err


@pytest.mark.parametrize("is_elastic", [False, True])
def test_the_strategies_of_a_process_are_all_elastic_or_none(is_elastic, monkeypatch):
    monkeypatch.setattr(exchange_start, "_boundary", SimpleNamespace(exchange=SimpleNamespace(failure=None)))
    monkeypatch.setattr(exchange_start, "_group", None if is_elastic else object())
    worker = SimpleNamespace(task_type="worker", task_id=0)
    with pytest.raises(ValueError, match=f"Received: .* with `elastic={is_elastic}`, after .*{not is_elastic}"):
        exchange_start.workers_boundary({"worker": ["a:1", "b:1"]}, worker, 1.0, is_elastic=is_elastic)


def test_it_may_be_turned_off_for_a_script_that_elastic_runs_start(monkeypatch):
    monkeypatch.setenv("TFDIST_ELASTIC", "1")
    with pytest.raises(ValueError, match="`shard_optimizer_state` does not work with `elastic`"):
        MultiWorkerMirroredStrategy(shard_optimizer_state=True)
    MultiWorkerMirroredStrategy(shard_optimizer_state=True, elastic=False)
