"""Keras' import does not import what it could do without, in the processes of tests; their programs may import it."""

import json
import subprocess
import sys

from child_environment import child_environment

PACKAGE = """
import gc, pandas
collects = gc.isenabled()
try:
    import sklearn
    found = True
except ImportError:
    found = False
"""
PROGRAM = """
import gc, json, sys
if sys.argv[1:]:
    import sklearn
import keras
before = keras.found, keras.tensorflow.found, keras.collects, keras.tensorflow.collects
import sklearn
print(json.dumps([*before, gc.isenabled(), sklearn.is_fake]))
unknown = isinstance(3.0, keras.pandas.Series)
import pandas
assert not unknown and isinstance(3.0, pandas.Series) and isinstance(3.0, keras.pandas.Series)
assert isinstance([], keras.pandas.DataFrame) and not isinstance([], keras.pandas.Series)
"""


def seen(folder, *arguments):
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return json.loads(subprocess.check_output(command, env=child_environment(folder), cwd=folder))


def test_optional_packages_are_hidden_only_while_a_framework_is_imported(tmp_path):
    (tmp_path / "tensorflow.py").write_text(PACKAGE)
    (tmp_path / "keras.py").write_text(f"import tensorflow\n{PACKAGE}")
    (tmp_path / "sklearn.py").write_text("is_fake = True")
    (tmp_path / "pandas.py").write_text("DataFrame, Series = list, float")
    assert seen(tmp_path) == [False, False, False, False, True, True]
    assert seen(tmp_path, "imported before") == [True, True, False, False, True, True]
