"""`on_ray` on a local Ray: the contract of engines, resources, and calls within tasks."""

import engine_functions as functions
import pytest
from engine_contract import BOTH, EngineContract
from engine_runs import eventually, launched_processes
from local_ray import local_ray, require_ray

from tfdist.launch import on_ray

ray = require_ray()


@pytest.fixture(scope="module")
def temporary(tmp_path_factory):
    """The directory of temporary files of this process and of places, with Ray started."""
    directory = tmp_path_factory.mktemp("temporary")
    with local_ray(directory):
        yield directory


@pytest.fixture
def engine(temporary):
    """Ray with two cores; afterwards both are free, and there is no actor, no launcher, no file."""
    yield ray
    eventually(lambda: ray.available_resources().get("CPU") == 2, "cores are free")
    eventually(lambda: not launched_processes(temporary), "launchers have ended")
    eventually(lambda: not list(temporary.glob("tfdist-*")), "the directories of places")


class TestOnRay(EngineContract):
    """A place is an actor."""

    call = staticmethod(on_ray)
    owner = 3
    too_few = r"Received: a cluster with {.*'CPU': 2.0.* Expected: workers=3, each with"
    lost = "place 1 was lost"
    one_place_threads = "2"
    driver_context = '__import__("ray").init(address=sys.argv[1], logging_level="warning")'

    def one_place(self, engine):
        return {"resources_per_worker": {"CPU": 2}}

    def address(self, engine):
        return engine.get_runtime_context().gcs_address


def test_resources_that_are_not_there_are_named(engine):
    with pytest.raises(TimeoutError, match=r"each with {'GPU': 1}"):
        on_ray(functions.task_and_threads, 1, workers=1, resources_per_worker={"GPU": 1}, start_timeout_seconds=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resources_per_worker": {"CPU": -1}}, "Invalid `resources_per_worker`. Received: {'CPU': -1}"),
        ({"resources_per_worker": {}}, "Invalid `resources_per_worker`"),
        ({"resources_per_worker": {"CPU": "2"}}, "Invalid `resources_per_worker`"),
        ({"placement_strategy": "pack"}, "Invalid `placement_strategy`. Received: 'pack'. Expected: one of PACK"),
        ({"workers": 0}, "Invalid `workers`"),
    ],
)
def test_invalid_options(options, words):
    with pytest.raises(ValueError, match=words):
        on_ray(functions.task_and_threads, 1, **{"workers": 1, **options})


@pytest.mark.long
def test_a_task_of_ray_calls_on_ray(engine):
    @ray.remote(num_cpus=0)
    def call():
        return on_ray(functions.task_and_threads, 1, workers=2)

    assert ray.get(call.remote(), timeout=120) == BOTH
