"""The random generators of workers start from the seed of the run."""

import os
import random
import re
import subprocess
import sys
import zipfile

import pytest

from tfdist.launch.processes.worker_process import seeded_environment

# NumPy is imported late, and a library of the program's own draws while it is imported.
DRAWS = """
    import random
    note_path = os.environ.get("PYTHONPATH")
    first = random.random()
    import numpy as np
    np.random.seed(3) if "seeds-itself" in sys.argv else None
    child = subprocess.run([sys.executable, "-c", "import random; print(random.random())"], capture_output=True)
    ordered = list({"a", "b", "c", "d", "e"})
    say(first, np.random.random(), ordered, os.environ["TFDIST_SEED"], "start_up" in str(note_path))
    say("child", child.stdout.decode().strip())
    if ATTEMPT == 0 and "dies" in sys.argv:
        die() if RANK == 1 else hang()
"""

# As import hooks of profilers do.
OWN_SITECUSTOMIZE = """
import random, sys
from importlib.machinery import PathFinder

class Finder:
    def find_spec(self, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: execute(module)
        return spec

random.seed(6)
sys.meta_path.insert(0, Finder())
"""


def drawn(ended):
    assert ended.code == 0, ended
    lines = [line for rank in (0, 1) for line in ended.of(rank) if not line.startswith("child")]
    return lines, [line for rank in (0, 1) for line in ended.of(rank) if line.startswith("child")]


def test_workers_and_restarts_draw_the_same_and_two_runs_do_not(run):
    first, children = drawn(run(DRAWS, "--max-restarts", "1", "--restart-delay", "0", arguments=("dies",)))
    assert len(first) >= 3 and len(set(first)) == 1
    assert first[0].endswith("False"), "the program sees the user's PYTHONPATH"
    assert len(set(children)) == len(children), "processes that a worker starts draw their own numbers"
    second, _ = drawn(run(DRAWS))
    assert set(second).isdisjoint(first)


def test_the_seed_of_the_user_is_kept(run):
    numbers = {}
    for seed, options in (("5", ()), ("6", ("--seed", "6"))):
        lines, _ = drawn(run(DRAWS, *options, arguments=("seeds-itself",), env={"TFDIST_SEED": "5"}))
        numbers[seed] = lines[0].split(" ")
    assert numbers["5"][0] == "0.6229016948897019"  # random.Random(5).random()
    assert numbers["5"][0] != numbers["6"][0]
    assert numbers["5"][1] == numbers["6"][1] == "0.5507979025745755"  # np.random.RandomState(3).random_sample()


def test_a_sitecustomize_of_the_user_still_runs(run, environ, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text(OWN_SITECUSTOMIZE)
    path = f"{own}:{environ['PYTHONPATH']}"
    code = "import random, sitecustomize; say(random.random(), sitecustomize.__file__, os.environ['PYTHONPATH'])"
    code += "; import numpy as np; say(np.random.random())"
    ended = run(code, "--seed", "3", workers=1, env={"PYTHONPATH": path})
    first, second = ended.of(0)
    assert first == f"0.793340083761663 {own}/sitecustomize.py {path}"  # random.Random(6).random()
    assert second == "0.5507979025745755", "NumPy is seeded although another finder has found it"


def test_a_library_may_look_whether_keras_is_installed(run, environ, tmp_path):
    with zipfile.ZipFile(tmp_path / "libraries.zip", "w") as libraries:  # one loader finds all its modules
        libraries.writestr("keras.py", "import random; random.random()")
        libraries.writestr("unrelated.py", "def seed(number): raise AssertionError('is not seeded')")
    code = """
        import importlib.util, random
        importlib.util.find_spec("keras")
        import unrelated, keras, numpy as np
        importlib.reload(np.random)
        say(random.random(), np.random.random())
    """
    ended = run(
        code, "--seed", "5", workers=1, env={"PYTHONPATH": f"{tmp_path / 'libraries.zip'}:{environ['PYTHONPATH']}"}
    )
    first, second = ended.of(0)[0].split(" ")
    assert first == "0.6229016948897019", "what keras draws while it is imported is not missing"
    assert second == "0.22199317108973948"  # np.random.RandomState(5).random_sample(): seeded by the first import


@pytest.mark.parametrize("hash_seed", [None, "3"])
def test_an_environment_without_a_python_path(hash_seed):
    environ = {"PATH": os.environ["PATH"], **({} if hash_seed is None else {"PYTHONHASHSEED": hash_seed})}
    code = "import os, random; print(random.random(), os.environ['PYTHONHASHSEED'], os.environ.get('PYTHONPATH'))"
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, env=seeded_environment(environ, 7), capture_output=True, check=True, text=True)
    assert said.stdout.split() == [str(random.Random(7).random()), hash_seed or "7", "None"]


@pytest.mark.parametrize("seed", ["-1", "4294967296", "one"])
def test_an_invalid_seed(run, seed):
    ended = run("say('started')", f"--seed={seed}")
    assert ended.code == 2
    assert re.search(r"Expected: a whole number of at least 0 and at most 4294967295, for example 1\.", str(ended))


def test_all_hosts_have_the_seed_of_node_0(both):
    ended = both("import random; say(os.environ['TFDIST_SEED'], random.random(), os.environ['PYTHONHASHSEED'])")
    assert len({each.out[0].removeprefix(f"[{rank}] ") for rank, each in enumerate(ended)}) == 1
