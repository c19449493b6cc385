"""`tfdist run --plan`: the processes that it starts, their environment, and wrong commands."""

import argparse

import pytest
from written_plans import plan, write_plans

from tfdist.launch.cli.main import add_command, main
from tfdist.launch.cli.run_options import apply_plan

SERVERS = plan("ParameterServerStrategy", workers=2, parameter_servers=1, has_chief=True, samples_per_second=900.0)
STAGES = plan("ModelParallelStrategy", workers=3, has_chief=True, samples_per_second=700.0)
LAYOUT = plan("ModelParallelStrategy", workers=5, has_chief=True, arguments={"layout_map": {}}, samples_per_second=1e6)


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(), "run")
    return parser.parse_args(["run", *arguments, "train.py"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], (2, 1, False)),
        (["--workers", "3"], (3, 0, True)),
        (["--workers", "4"], (4, 0, False)),
        (["--nodes", "3"], (1, 0, True)),  # without parameter servers
        (["--nodes", "2", "--workers", "2"], (2, 0, False)),
    ],
)
def test_the_processes_are_those_of_the_best_plan(tmp_path, arguments, expected):
    path = write_plans(tmp_path / "plan.json", LAYOUT, SERVERS, plan(workers=2), STAGES, plan(workers=4))
    options = parsed("--plan", str(path), *arguments)
    assert apply_plan(options) == {"TFDIST_PLAN": str(path)}
    assert (options.workers, options.parameter_servers, options.chief) == expected


def test_without_a_plan_the_options_stay(tmp_path):
    options = parsed("--workers", "2", "--chief")
    assert apply_plan(options) == {}
    assert (options.workers, options.parameter_servers, options.chief) == (2, 0, True)


def test_workers_get_the_absolute_path_also_after_a_restart(run, tmp_path):
    path = write_plans(tmp_path / "plan.json", plan(workers=2))
    script = """
        print(os.environ["TFDIST_PLAN"], len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]))
        if ATTEMPT == 0:
            beat(step=1)
            sys.exit(1)
    """
    ended = run(script, "--plan", "plan.json", "--max-restarts", "1", "--restart-delay", "0", workers=2)
    assert ended.code == 0, ended.err
    assert [ended.of(rank)[-1] for rank in range(2)] == [f"{path} 2"] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "The number of workers is missing. Received: neither --workers nor --plan. Expected: tfdist run --work"),
        (["--plan", "none.json"], "The plan cannot be read. Received: none.json (FileNotFoundError"),
        (["--plan", "train.py"], "The plan cannot be read. Received: train.py"),
        (
            ["--plan", "plan.json", "--chief"],
            "The plan chooses parameter servers and chief. Received: --plan plan.json --chief. Expected: one of them. "
            "Remove --chief to train",
        ),
        (
            ["--plan", "plan.json", "--parameter-servers", "2"],
            "Received: --plan plan.json --parameter-servers 2. Expected: one of them. Remove --parameter-servers to",
        ),
        (
            ["--plan", "plan.json", "--workers", "4"],
            "The plan has nothing for this number of workers. Received: --plan plan.json --workers 4, and plans for 2 "
            "workers with 1 parameter server; 3 workers. Expected: a number of workers of one of them. Change --work",
        ),
        (
            ["--plan", "plan.json", "--workers", "2", "--nodes", "3"],
            "--workers 2 --nodes 3, and plans for 2 workers with 1 parameter server; 3 workers. Expected: a number of "
            "workers of one of them, all hosts together and without parameter servers.",
        ),
        (["--plan", "plan.json", "--nodes", "2"], "cannot be divided among the hosts. Received: --nodes 2 and 3 work"),
        (
            ["--plan", "plan.json", "--min-workers", "1"],
            "--min-workers does not apply to workers beside parameter servers",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_commands(capfd, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise AssertionError('not started')")
    write_plans(tmp_path / "plan.json", LAYOUT, SERVERS, plan(workers=3))
    assert main(["run", *arguments, "train.py"]) == 2
    captured = capfd.readouterr()
    assert message in captured.err and "not started" not in captured.err
