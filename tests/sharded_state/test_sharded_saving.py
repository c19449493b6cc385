"""Files of sharded optimizer state have whole slots, and state that was whole can be loaded."""

import keras
import pytest
import sharded_models
import tensorflow as tf
from keras import optimizers

from tfdist.strategies import MirroredStrategy


@pytest.fixture
def sharded(cpus):
    return MirroredStrategy(cpus[:3], shard_optimizer_state=True)


def assert_same(ours, theirs):
    ours, theirs = (
        {key: value.tolist() for key, value in sharded_models.values(one).items()} for one in (ours, theirs)
    )
    assert ours == theirs


@pytest.mark.parametrize("name", ["everything", pytest.param("loss_scale", marks=pytest.mark.long)])
def test_a_keras_file_between_sharded_and_plain(sharded, tmp_path, name):
    model = sharded_models.trained(sharded, sharded_models.OPTIMIZERS[name])
    model.save(tmp_path / "sharded.keras")
    plain = keras.models.load_model(tmp_path / "sharded.keras")
    assert_same(plain, model)
    plain.save(tmp_path / "plain.keras")
    with sharded.scope():
        again = keras.models.load_model(tmp_path / "plain.keras")
    assert_same(again, model)
    assert sum(sharded_models.owned_values(_holder(again))) > 0
    sharded_models.fit(again, epochs=1)
    sharded_models.fit(model, epochs=1)
    assert_same(again, model)


def _holder(model):
    class Holder:
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)

    return Holder


def test_a_tensorflow_checkpoint_between_sharded_and_whole(sharded, cpus, tmp_path):
    optimizer = sharded_models.OPTIMIZERS["averages"]
    model = sharded_models.trained(sharded, optimizer)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "checkpoint")
    for strategy in (MirroredStrategy(cpus[:2]), sharded):
        other = sharded_models.trained(strategy, optimizer, epochs=1)
        tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path).assert_consumed()
        assert_same(other, model)


def test_weights_become_their_averages_at_the_end(sharded):
    model = sharded_models.trained(sharded, sharded_models.OPTIMIZERS["averages"])
    averages = [slot.numpy() for slot in model.optimizer._model_variables_moving_average]
    assert [weight.tolist() for weight in model.get_weights()] == [average.tolist() for average in averages]


def test_set_weights_and_get_config(sharded):
    model = sharded_models.trained(sharded, sharded_models.OPTIMIZERS["adam"])
    values = [variable.numpy() * 2 for variable in model.optimizer.variables]
    model.optimizer.set_weights(values)
    assert [variable.numpy().tolist() for variable in model.optimizer.variables] == [one.tolist() for one in values]
    assert isinstance(optimizers.Adam.from_config(model.optimizer.get_config()), optimizers.Adam)


@pytest.mark.parametrize("swap_on_epoch", [False, pytest.param(True, marks=pytest.mark.long)])
def test_averages_are_swapped_for_an_evaluation(cpus, swap_on_epoch):
    data = [sharded_models.NUMBERS, sharded_models.WORDS], sharded_models.TARGETS
    histories = []
    for shards in (True, False):
        strategy = MirroredStrategy(cpus[:2], shard_optimizer_state=shards)
        model = sharded_models.compiled(strategy, sharded_models.OPTIMIZERS["averages"])
        callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch)]
        histories.append(sharded_models.fit(model, validation_data=data, callbacks=callbacks).history)
    for key, values in histories[1].items():
        assert histories[0][key] == pytest.approx(values, rel=1e-5), key


def test_a_saved_model(sharded, tmp_path):
    model = sharded_models.trained(sharded, sharded_models.OPTIMIZERS["momentum"])
    tf.saved_model.save(model, tmp_path)
    loaded = tf.saved_model.load(tmp_path)
    names = [name for name, _ in tf.train.list_variables(str(tmp_path / "variables" / "variables"))]
    assert sum("optimizer" in name for name in names) >= len(model.optimizer.variables)
    assert loaded is not None
