"""Workers with one and with two devices compute what one process computes, under `tfdist run`."""

import elastic_programs
import numpy as np
import pytest
import unequal_programs
from elastic_programs import assert_close, of
from one_process import in_one_process
from shared_workers import run_of_program

from tfdist.strategies import worker_start
from tfdist.strategies.worker_start import described

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture(scope="module")
def workers(request):
    """The outcomes and the observations of each rank."""
    run = run_of_program(request, "on_workers_unequal").assert_complete()
    return [run.arrays(f"unequal-{rank}.npz") for rank in range(2)], [
        run.json(f"seen-{rank}.json") for rank in range(2)
    ]


@pytest.mark.multi_process
class TestOnWorkers:
    @pytest.mark.parametrize("program", sorted(unequal_programs.PROGRAMS))
    def test_weights_losses_metrics_and_predictions_are_those_of_one_process(self, workers, program):
        one = elastic_programs.flat({program: in_one_process(unequal_programs.PROGRAMS[program])})
        for outcomes in workers[0]:
            assert_close(of(outcomes, program), of(one, program))

    def test_weights_are_bit_identical_on_all_replicas(self, workers):
        first, second = workers[0]
        for name in first:
            if "/weights/" in name:
                np.testing.assert_array_equal(first[name], second[name], name)

    @pytest.mark.parametrize("program", ["micro-batches", "resumed"])
    def test_micro_batches_and_recovery_change_nothing(self, workers, program):
        for outcomes in workers[0]:
            assert_close(of(outcomes, program), of(outcomes, "accumulating"))

    def test_compression_sums_by_worker_first(self, workers):
        one = elastic_programs.flat({"compressed": in_one_process(elastic_programs.compressed)})
        for outcomes in workers[0]:
            ours = of(outcomes, "compressed")
            assert ours["exchanges/1"] > 0
            for name in (name for name in ours if name.startswith("weights")):
                # PowerSGD's Gram matrix: see test_compression_on_workers.py.
                np.testing.assert_allclose(ours[name], of(one, "compressed")[name], rtol=1e-3, atol=1e-3)

    def test_every_worker_knows_the_devices_of_all(self, workers):
        assert [(seen["replicas"], seen["of_workers"]) for seen in workers[1]] == [(3, [1, 2])] * 2

    def test_reduce_and_gather_take_values_of_replicas_and_of_workers(self, workers):
        for seen in workers[1]:
            assert seen["ids"] == [0, 1, 2]
            assert seen["gathered"] == [10.0, 20.0]
            assert seen["worker values"] == [[30.0], [15.0]]
            assert seen["replica values"] == [[9.0], [3.0]]
            assert seen["mean of rows"] == 3.0
            assert seen["summed variable"] == "ValueError"

    def test_files_are_read_by_one_worker_each_in_shares_of_its_devices(self, workers):
        first, second = (seen["files"] for seen in workers[1])
        assert first == [[["00", "01"]], [["02", "03"]], [["04", "05"]]]
        assert second == [[["10", "11"], ["12", "13"]], [["14", "15"], []], [[], []]]


def test_devices_of_different_types_are_refused_by_all_workers(monkeypatch):
    others = [described("GPU", 2)]
    monkeypatch.setattr(worker_start.key_values, "exchange", lambda name, own, rank, size: [own, *others])
    with pytest.raises(ValueError, match=r"devices of one type. Received: worker 0: 1 CPU, worker 1: 2 GPU"):
        worker_start.devices_of_workers("CPU", 1, 0, 2, "devices", use_nccl=False)
    others = [described("CPU", 2)]
    assert worker_start.devices_of_workers("CPU", 1, 0, 2, "devices", use_nccl=False) == (1, 2)
