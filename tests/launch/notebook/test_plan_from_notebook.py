"""`plan_from_notebook`: its command, its result, which `from_notebook` uses, and errors."""

import json
import re

import pytest
from notebook_cells import forget_clusters
from written_plans import plan, write_plans

from tfdist.launch import WorkerError, from_notebook, plan_from_notebook
from tfdist.launch import notebook as module
from tfdist.launch.function_call.launcher_process import LauncherProcess

pytest.importorskip("cloudpickle", reason="needs the extra `notebook`")
TABLE = "2 workers; the best 1 of 1 plan\n\n1. data parallel\n     strategy = S()\n     $ tfdist run --workers 2 x.py\n"


@pytest.fixture(autouse=True)
def outside_of_clusters(monkeypatch):
    forget_clusters(monkeypatch)


@pytest.fixture
def commands(monkeypatch):
    """Replaces the process of `tfdist plan`: it writes two plans. Returns the commands; `code` is its exit code."""

    class Launcher:
        seen: list[list[str]] = []
        code, error, last_lines = 0, "", ("tfdist plan: The program never calls `fit`.",)

        def __init__(self, arguments, *, printed):
            self.seen.append(arguments)
            self.arguments, self.printed = arguments, printed

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def follow(self):
            with open(self.printed, "w") as file:
                file.write(TABLE)
            write_plans(module.Path(self.arguments[self.arguments.index("--json") + 1]), plan(), plan(workers=4))
            return self.code

    def launcher_of(arguments, **options):
        return (Launcher if arguments[0] == "plan" else LauncherProcess)(arguments, **options)

    Launcher.seen = []
    monkeypatch.setattr(module, "LauncherProcess", launcher_of)
    return Launcher


def where(scale):
    import os

    from tfdist import cluster

    return scale * cluster.detect().cluster.num_workers, os.environ["TFDIST_PLAN"].rpartition("/")[2]


def test_the_result_has_the_plans_and_the_table(commands, tmp_path):
    plans = plan_from_notebook(where, 1, workers=(2, 4), link="1gbit,0.1ms", allow_compression=True, memory="2GiB")
    assert plans.plans == (plan(), plan(workers=4)) and plans.too_large == ()
    assert repr(plans) == "2 workers; the best 1 of 1 plan\n\n1. data parallel\n     strategy = S()"
    plans.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["plans"][1]["workers"] == 4
    [arguments] = commands.seen
    folder, script = arguments[-1].rpartition("/")[::2]
    options = "--devices 1 --json {0}/plan.json --timeout 60 --link 1gbit,0.1ms --memory 2GiB --allow-compression"
    assert arguments == ["plan", "--workers", "2,4", *options.format(folder).split(), arguments[-1]]
    assert script == "function.py"


def test_from_notebook_starts_the_processes_of_the_plan(commands, tmp_path):
    plans = plan_from_notebook(where, 1)
    assert from_notebook(where, 10, plan=plans) == [(20, "plan.json")] * 2
    stages = plan("ModelParallelStrategy", workers=1, has_chief=True)
    path = write_plans(tmp_path / "stages.json", stages)
    assert from_notebook(where, 10, plan=path) == [(20, "stages.json")], "the chief alone"
    with pytest.raises(ValueError, match="nothing for this number of workers. Received: plan=.* workers=3"):
        from_notebook(where, 1, plan=path, workers=3)
    with pytest.raises(ValueError, match="The plan cannot be read. Received: none.json"):
        from_notebook(where, 1, plan="none.json")


def test_failures(commands):
    commands.code = 1
    with pytest.raises(WorkerError, match="could not be planned. Received: exit code 1.*\n.*never calls `fit`"):
        plan_from_notebook(where, 1)
    commands.error = "Workers without link are on this machine"
    with pytest.raises(ValueError, match="Workers without link are on this machine"):
        plan_from_notebook(where, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": ()}, "There is no number of workers. Received: workers=()"),
        ({"workers": (2, 0)}, "Invalid `workers`. Received: workers=0"),
        ({"devices": 0}, "Invalid `devices`"),
        ({"cores_per_worker": 1.5}, "Invalid `cores_per_worker`"),
        ({"timeout_seconds": -1}, "Invalid `timeout_seconds`"),
        ({"link": "0gbit"}, "Received: '0gbit'"),
        ({"memory": "2"}, "Invalid size of a memory. Received: '2'"),
    ],
    ids=str,
)
def test_invalid_options(commands, options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        plan_from_notebook(where, 1, **options)
    assert commands.seen == []


def test_a_function_is_needed(commands):
    with pytest.raises(TypeError, match=re.escape("plan_from_notebook(train), not plan_from_notebook(train())")):
        plan_from_notebook(1)
    with pytest.raises(TypeError, match="cannot be sent to the workers"):
        plan_from_notebook(where, (number for number in "1"))
