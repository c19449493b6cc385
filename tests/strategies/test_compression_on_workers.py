"""Compression between workers that `tfdist run` has started: two, three, and two of two devices."""

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from exchange_model import SHAPES, STEPS, gradient
from exchange_references import differences
from launched_runs import launch

from tfdist.compression import Quantize, TopK

_HERE = Path(__file__).resolve().parent

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("cpus")]


@dataclass(frozen=True)
class Seen:
    """What the ranks of a run have written: `steps[rank][step]`, by variable, and what they have kept at the end."""

    json: list
    arrays: list

    @property
    def steps(self):
        return [
            [{name: arrays[f"{step}:{name}"] for name in SHAPES} for step in range(STEPS)] for arrays in self.arrays
        ]


def seen_by(run, workers):
    ranks = range(workers)
    return Seen(
        [run.json(f"compression-{rank}.json") for rank in ranks],
        [run.arrays(f"compression-{rank}.npz") for rank in ranks],
    )


@pytest.fixture(scope="module")
def runs(elastic_workers, workers_of_two_devices, tmp_path_factory):
    """`runs(workers, devices)`; the three workers resume with what the two have saved."""

    @functools.cache
    def run(workers, devices):
        if workers == 2:
            return seen_by(elastic_workers if devices == 1 else workers_of_two_devices, 2)
        saved = [seen["prefix"] for seen in run(2, 1).json]
        script, options = _HERE / "on_workers_compression.py", ["--workers", "3"]
        three = launch(tmp_path_factory.mktemp("three"), script, *saved, options=options)
        return seen_by(three.assert_complete(), 3)

    return run


# By default test_compressed_training.py exchanges among three replicas, whose sums are encoded twice.
CLUSTERS = pytest.mark.parametrize(
    "cluster", [(2, 1), pytest.param((3, 1), marks=pytest.mark.long), (2, 2)], ids="{0[0]} x {0[1]}".format
)


@CLUSTERS
def test_every_method_equals_numpy(runs, cluster):
    workers, devices = cluster
    seen = runs(*cluster)
    for steps in seen.steps[1:]:
        for ours, firsts in zip(steps, seen.steps[0], strict=True):
            for name in SHAPES:
                np.testing.assert_array_equal(ours[name], firsts[name], name)

    def of_workers(name, step):
        """Dense sums over the devices of each worker: what is compressed between the workers."""
        own = [gradient(name, replica, step) for replica in range(workers * devices)]
        return [sum(own[i + 1 : i + devices], start=own[i]) for i in range(0, len(own), devices)]

    apart, residuals = differences(seen.steps[0], of_workers)
    for name, difference in apart.items():
        # As under MirroredStrategy: the rounding of float32, and PowerSGD's Gram matrix.
        assert difference < (1e-4 if name == "powersgd" else 1e-6), (name, difference)
    for rank, arrays in enumerate(seen.arrays):
        assert seen.json[rank]["number"] == rank
        for name in set(SHAPES) - {"bf16", "bias"}:
            off = np.sort(np.abs(arrays[f"residual:{name}"] - residuals[name][rank]), axis=None)[:-2]
            assert off.max() < (1e-3 if name == "powersgd" else 1e-4), (name, off.max())


@CLUSTERS
def test_a_model_has_the_same_weights_everywhere(runs, cluster):
    digests = [seen["digest"] for seen in runs(*cluster).json]
    assert all(digest == digests[0] for digest in digests)


@CLUSTERS
def test_a_worker_sends_its_payloads_to_workers_alone(runs, cluster):
    workers, _ = cluster
    for seen in runs(*cluster).json:
        payload = TopK(0.1, 64).payload_bytes(SHAPES["topk"])
        assert seen["wire"][repr(TopK(0.1, 64))] == STEPS * (workers - 1) * payload
        # Two variables travel by this method, of which one is too small and goes as it is.
        payload = Quantize(8).payload_bytes(SHAPES["int8"]) + 4 * SHAPES["bias"][0]
        sent = seen["wire"][repr(Quantize(8))] / STEPS
        blocks = -(-33 * 65 // 256)  # of three workers each has as many, the last perhaps empty ones
        padding = 260 * (-blocks % workers) + 4 * 2 * workers if workers > 2 else 0
        assert payload * 2 * (workers - 1) / workers <= sent <= (payload + padding) * 2 * (workers - 1) / workers


@pytest.mark.long  # by default test_compressed_checkpoints.py resumes with other numbers of replicas
def test_three_workers_go_on_with_the_residuals_of_two(runs):
    for name in set(SHAPES) - {"bf16", "bias"}:
        saved = sum(arrays[f"residual:{name}"] for arrays in runs(2, 1).arrays)
        delivered = runs(3, 1).arrays[0][f"late:{name}"]
        kept = sum(arrays[f"late residual:{name}"] for arrays in runs(3, 1).arrays)
        assert np.abs(delivered).max() > 0
        # A dozen additions of float32, each off by 6e-8 of the largest number.
        np.testing.assert_allclose(delivered + kept, saved, atol=12 * 6e-8 * np.abs(saved).max() * 3)
