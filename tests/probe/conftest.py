import textwrap

import pytest
from child_environment import child_environment

from tfdist.probe.run_probe import measure


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Measures the source of a program, in a directory of its own."""
    monkeypatch.setenv("PYTHONPATH", child_environment()["PYTHONPATH"])  # the import of Keras is cheaper

    def run(source, **options):
        script = tmp_path / "train.py"
        script.write_text(textwrap.dedent(source))
        defaults = {"workers": [2], "methods": [], "with_xla": False, "timeout_seconds": 600}
        return measure([str(script)], **defaults | options)

    return run
