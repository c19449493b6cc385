"""Workers of a custom loop are lost and join: weights, metrics and Python state are those of one process."""

import random

import pytest
import tensorflow as tf
import torchdata_stand_in
from loop_workers import BATCH, ROWS, LoopWorker, LoopWorkers
from loop_workers import data as training_data
from thread_workers import training, wait_until

pytestmark = pytest.mark.usefixtures("cpus", "eager_functions")


@pytest.fixture(scope="module")
def eager_functions():
    """Threads that wait for each other within functions would use up TensorFlow's."""
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


def test_workers_that_are_lost_within_a_step_join_again():
    with training(3, LoopWorkers) as workers:
        oldest = workers.of_rank(0)
        oldest.after_exchange = oldest.kill  # the others have the sums of this step
        workers.wait_for_steps(1, 2)
        workers.start(0)
        workers.wait_for_steps(0, 1, 2, steps=12)
        workers.of_rank(1).kill()
        workers.of_rank(2).kill()
        workers.wait_for_steps(0, steps=12)
        workers.finish()


def test_workers_join_a_loop_over_a_loader(monkeypatch):
    """Its order depends on the passes before; the worker that joins draws none of their batches."""
    torch, loader = torchdata_stand_in.install(monkeypatch)

    def data():
        rows = [(torch.tensor(number),) for number in range(1, ROWS)]
        return loader(rows, batch_size=BATCH, shuffle=True, generator=torch.Generator(7))

    def data_of_one():
        rows = data()
        next(iter(rows))  # the loop reads the shapes of batches first
        return rows

    worker = type("LoaderWorker", (LoopWorker,), {"data": staticmethod(data)})
    kind = type("LoaderWorkers", (LoopWorkers,), {"worker": worker, "data_of_one": staticmethod(data_of_one)})
    with training(2, kind) as workers:
        workers.of_rank(1).kill()
        workers.wait_for_steps(0, steps=8)
        workers.start(1)
        workers.wait_for_steps(0, 1, steps=8)
        workers.finish()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_losses_and_joins(seed):
    choose = random.Random(seed)
    with training(3, LoopWorkers) as workers:
        for _ in range(8):
            living = [worker.rank for worker in workers.trained]
            lost = [rank for rank in range(3) if rank not in living]
            if lost and (len(living) == 1 or choose.random() < 0.5):
                rank = choose.choice(lost)
                workers.start(rank)
                living.append(rank)
            else:
                victim = workers.of_rank(choose.choice(living))
                living.remove(victim.rank)
                if choose.random() < 0.5:
                    victim.after_exchange = victim.kill
                else:
                    victim.kill()
            workers.wait_for_steps(*living, steps=choose.randrange(12))
        workers.finish()


def joined_with_error(change):
    """The error of a worker that joins after `change` of its class."""
    with training(2, LoopWorkers) as workers:
        workers.of_rank(1).kill()
        workers.wait_for_steps(0)
        late = type("Late", (LoopWorker,), change)(1, workers.addresses, **workers.options)
        workers.all.append(late)
        wait_until(lambda: late.error is not None, "it ends")
        workers.wait_for_steps(0)
        workers.finish()
    return late.error


@pytest.mark.long
def test_a_worker_that_joins_with_other_data_ends():
    error = joined_with_error({"data": staticmethod(lambda: training_data().shuffle(4, seed=8))})
    assert isinstance(error, ValueError) and "draws other data than before" in str(error)


@pytest.mark.long
def test_a_worker_that_joins_with_other_objects_ends():
    def loop_member(worker, objects):
        return LoopWorker.loop_member(worker, [objects, tf.Variable([1.0])])

    error = joined_with_error({"loop_member": loop_member})
    assert isinstance(error, ValueError)
    assert "The first difference is the variable 'state/0/weight/value'" in str(error)


@pytest.mark.long
def test_a_state_that_cannot_be_sent_ends_the_worker_that_asks():
    with training(2, LoopWorkers) as workers:
        workers.of_rank(1).kill()
        workers.wait_for_steps(0)
        workers.of_rank(0).log.get_state = lambda: 1 / 0
        late = workers.start(1)
        wait_until(lambda: late.error is not None, "it ends")
        assert "ZeroDivisionError" in str(late.error)
        workers.wait_for_steps(0)
        workers.finish()
