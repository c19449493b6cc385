"""Checks the rules of the code: who may import whom, where private symbols live, what an import may do.

`tests/support/architecture_rules.py` has the rules as tables. Every rule has a test with a source that breaks it.
"""

import pytest
from architecture_rules import ROOT, TOPS, house_files, repeated_names, shown_arrows, unused_arrows, violations


def test_files_keep_the_rules() -> None:
    files = {path: (ROOT / path).read_text(encoding="utf-8") for path in house_files()}
    found = [f"{path}: {rule}" for path, source in files.items() for rule in sorted(violations(path, source))]
    assert not found, "\n".join(found)


def test_every_room_is_checked() -> None:
    assert {path.partition("/")[0] for path in house_files()} == set(TOPS)


def test_no_two_modules_have_the_same_name() -> None:
    assert repeated_names(house_files()) == {}


def test_every_arrow_is_needed() -> None:
    assert unused_arrows({path: (ROOT / path).read_text(encoding="utf-8") for path in house_files()}) == {}


def test_the_page_shows_the_arrows() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## The life of a gradient")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| `")
    ]
    assert {first: last for first, *_, last in rows} == shown_arrows()


def test_a_repeated_name_and_an_unused_arrow_are_found() -> None:
    paths = [
        "tfdist/a/__init__.py",
        "strategies/__init__.py",
        "tfdist/a/link.py",
        "callbacks/link.py",
        "examples/link.py",
    ]
    assert repeated_names(paths) == {"link.py": ["tfdist/a/link.py", "callbacks/link.py"]}
    unused = unused_arrows({"tfdist/transport/a.py": "", "tfdist/checkpoint/a.py": "from tfdist.utils import x"})
    assert unused["transport"] == {"utils"} and "checkpoint" not in unused


@pytest.mark.parametrize("name", ["strategies", "callbacks"])
def test_links_are_relative_and_resolve(name: str) -> None:
    link = ROOT / "tfdist" / name
    assert link.is_symlink() and str(link.readlink()) == f"../{name}"
    assert link.resolve() == ROOT / name and (link / "__init__.py").is_file()


BREAKS = [
    # (file, source, the rule it breaks)
    ("tfdist/launch/cli/main.py", "import tfdist.strategies", "arrow: launch/cli -> strategies"),
    ("tfdist/launch/cli/main.py", "from tfdist import strategies", "arrow: launch/cli -> strategies"),
    ("tfdist/launch/cli/main.py", "from tfdist.strategies import mirrored", "arrow: launch/cli -> strategies"),
    ("tfdist/launch/cli/main.py", "from ...strategies import mirrored", "arrow: launch/cli -> strategies"),
    ("tfdist/launch/cli/main.py", "from ... import strategies", "arrow: launch/cli -> strategies"),
    (
        "tfdist/launch/cli/main.py",
        "import tfdist\ntfdist.strategies.MirroredStrategy()",
        "arrow: launch/cli -> strategies",
    ),
    ("tfdist/launch/cli/main.py", "import tfdist as t\ndef f(): t.strategies", "arrow: launch/cli -> strategies"),
    (
        "tfdist/launch/cli/main.py",
        "import importlib\nimportlib.import_module('tfdist.strategies')",
        "arrow: launch/cli ->",
    ),
    ("tfdist/launch/cli/main.py", "def f():\n    import keras", "framework: launch/cli uses keras"),
    ("tfdist/launch/cli/main.py", "from tensorflow import data", "framework: launch/cli uses tensorflow"),
    ("tfdist/cluster/slurm.py", "import tensorflow as tf", "framework: cluster uses tensorflow"),
    ("tfdist/cluster/slurm.py", "import numpy", "library: cluster imports numpy"),
    ("tfdist/__init__.py", "from tfdist.strategies import X", "arrow: tfdist -> strategies"),
    ("tfdist/__init__.py", "import tensorflow", "framework: tfdist uses tensorflow"),
    ("tfdist/versions.py", "import keras", "framework: versions uses keras"),
    ("tfdist/compression/cast.py", "from tfdist.collectives import group", "arrow: compression -> collectives"),
    (
        "tfdist/collectives/collective_group.py",
        "from tfdist.training import step",
        "arrow: collectives -> training",
    ),
    ("tfdist/training/sample_shares.py", "from tfdist.callbacks import x", "arrow: training -> callbacks"),
    ("tfdist/checkpoint/shard.py", "from tfdist.strategies import x", "arrow: checkpoint -> strategies"),
    ("tfdist/checkpoint/shard.py", "from tfdist.recovery import x", "arrow: checkpoint -> recovery"),
    (
        "tfdist/checkpoint/shard.py",
        "def f():\n    import tensorflow",
        "framework: checkpoint uses tensorflow",
    ),
    ("tfdist/launch/cli/main.py", "from tfdist.recovery import x", "arrow: launch/cli -> recovery"),
    (
        "tfdist/launch/restart/attempt_outcome.py",
        "from tfdist.launch.processes import x",
        "launch/restart -> launch/processes",
    ),
    (
        "tfdist/launch/restart/attempt_outcome.py",
        "from ..rendezvous import x",
        "arrow: launch/restart -> launch/rendezvous",
    ),
    ("tfdist/launch/restart/attempt_outcome.py", "from tfdist import launch", "arrow: launch/restart -> launch"),
    ("tfdist/launch/processes/worker_supervisor.py", "from tfdist.launch.rendezvous import x", "-> launch/rendezvous"),
    ("tfdist/launch/processes/worker_supervisor.py", "from tfdist.transport import x", "launch/processes -> transport"),
    ("tfdist/launch/rendezvous/membership.py", "from ..cli.run_options import x", "launch/rendezvous -> launch/cli"),
    ("tfdist/launch/rendezvous/membership.py", "def f():\n    import keras", "framework: launch/rendezvous uses keras"),
    (
        "tfdist/launch/notebook.py",
        "from tfdist.launch.rendezvous import x",
        "notebook -> launch/rendezvous",
    ),
    ("tfdist/launch/run_spec.py", "import tfdist.launch.cli.main", "arrow: launch/run_spec -> launch/cli"),
    ("tfdist/launch/__init__.py", "from tfdist.launch.restart import x", "arrow: launch -> launch/restart"),
    ("examples/a.py", "from tfdist.launch.processes import x", "arrow: examples -> launch/processes"),
    ("tfdist/transport/nonblocking_connection.py", "from tfdist.launch import x", "arrow: transport -> launch"),
    ("tfdist/transport/nonblocking_connection.py", "from tfdist.doctor import x", "arrow: transport -> doctor"),
    ("tfdist/utils/formatting.py", "from tfdist.cluster import x", "arrow: utils -> cluster"),
    ("tfdist/data_position/position.py", "from tfdist.recovery import x", "arrow: data_position -> recovery"),
    ("tfdist/parameter_server/chief.py", "from tfdist.training import x", "arrow: parameter_server -> training"),
    ("tfdist/doctor/check_runner.py", "from tfdist.launch import x", "arrow: doctor -> launch"),
    ("tfdist/doctor/check_runner.py", "def f():\n    import tensorflow", "framework: doctor uses tensorflow"),
    ("tfdist/pipeline/columns.py", "from tfdist.training import x", "arrow: pipeline -> training"),
    ("tfdist/pipeline/columns.py", "from tfdist.tensor_parallel import x", "arrow: pipeline -> tensor_parallel"),
    ("tfdist/recovery/resume.py", "from tfdist.strategies import x", "arrow: recovery -> strategies"),
    ("tfdist/recovery/resume.py", "from tfdist.launch import x", "arrow: recovery -> launch"),
    ("strategies/a.py", "from tfdist.recovery import x", "arrow: strategies -> recovery"),
    ("tfdist/keras_internals.py", "from tfdist.training import x", "arrow: internals -> training"),
    ("callbacks/a.py", "from tfdist.strategies import MirroredStrategy", "arrow: callbacks -> strategies"),
    ("callbacks/a.py", "from ..strategies import MirroredStrategy", "arrow: callbacks -> strategies"),
    ("strategies/a.py", "from tfdist.callbacks import b", "arrow: strategies -> callbacks"),
    ("strategies/a.py", "from tfdist.launch import b", "arrow: strategies -> launch"),
    ("examples/a.py", "from tfdist.training import step", "arrow: examples -> training"),
    ("benchmarks/a.py", "from tfdist import tensorflow_internals", "arrow: benchmarks -> internals"),
    ("tfdist/unknown_room.py", "", "arrow: unknown_room has no entry"),
    ("examples/a.py", "import strategies", "bare: import tfdist.strategies"),
    ("callbacks/a.py", "from callbacks.b import c", "bare: import tfdist.callbacks"),
    ("strategies/a.py", "from tensorflow.python.distribute import values", "private: tensorflow.python"),
    ("strategies/a.py", "from tensorflow import python", "private: tensorflow.python"),
    ("strategies/a.py", "def f():\n    from keras.src import backend", "private: keras.src"),
    ("strategies/a.py", "import importlib\nimportlib.import_module('keras.src.backend')", "private: keras.src"),
    ("strategies/a.py", "from x import private\nprivate('keras.src.backend:f', 'why')", "private: keras.src.backend:f"),
    ("strategies/a.py", "import tensorflow as tf\ntf.__internal__.eager_context", "private: tensorflow.__internal__"),
    ("strategies/a.py", "import keras as k\nk.Model._lock", "private: keras.Model._lock"),
    ("strategies/a.py", "from keras import Model as M\nM._lock", "private: keras.Model._lock"),
    ("tfdist/collectives/a.py", "import os\nX = os.environ.get('X')", "import effect: os.environ"),
    ("tfdist/collectives/a.py", "from os import environ\nif environ: pass", "import effect: os.environ"),
    ("tfdist/collectives/a.py", "import os\nclass A:\n    x = os.getenv('X')", "import effect: os.getenv"),
    ("tfdist/collectives/a.py", "import os\ndef f(x=os.environ): pass", "import effect: os.environ"),
    ("strategies/a.py", "import logging\nlogging.basicConfig()", "import effect: logging.basicConfig"),
    ("strategies/a.py", "import logging\nlogging.getLogger('x').setLevel(1)", "import effect: logging"),
    ("strategies/a.py", "import tensorflow as tf\nX = tf.constant(1)", "import effect: tensorflow.constant"),
    ("callbacks/a.py", "\n" * 501, "length: 501 lines"),
]


@pytest.mark.parametrize(("path", "source", "rule"), BREAKS)
def test_rule_catches(path: str, source: str, rule: str) -> None:
    assert any(rule in found for found in violations(path, source)), violations(path, source)


KEEPS = [
    (
        "strategies/a.py",
        "import tensorflow as tf\nfrom tfdist import collectives, tensorflow_internals\ntf.__version__",
    ),
    ("strategies/a.py", "from tfdist.strategies import mirrored\nfrom .b import c\nself._private = tf_like._x"),
    ("callbacks/a.py", "from keras import callbacks\nclass A(callbacks.Callback): pass"),
    ("tfdist/keras_internals.py", "from keras.src import backend\nfrom tensorflow.python import x"),
    ("tfdist/internals/x_internals.py", "from keras.src import backend"),
    (
        "tfdist/launch/cli/main.py",
        "import os\nfrom tfdist.cluster import ports\ndef f():\n    return os.environ, lambda: 1",
    ),
    ("strategies/a.py", "import tensorflow as tf\ndef f(a: list[tf.Variable]) -> tf.Variable: return tf.constant(1)"),
    ("tfdist/launch/cli/main.py", "import logging\nlog = logging.getLogger(__name__)"),
    ("tfdist/launch/cli/main.py", "import os\nif __name__ == '__main__':\n    os.environ['X'] = '1'"),
    ("examples/a.py", "import os\nimport tfdist\nos.environ['X'] = '1'\ntfdist.strategies.MirroredStrategy()"),
]


@pytest.mark.parametrize(("path", "source"), KEEPS)
def test_rule_lets_pass(path: str, source: str) -> None:
    assert not violations(path, source)
