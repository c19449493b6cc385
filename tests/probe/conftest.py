import textwrap

import pytest

from tfdist.probe.run_probe import measure


@pytest.fixture
def measured(tmp_path):
    """Measures the source of a program, in a directory of its own."""

    def run(source, **options):
        script = tmp_path / "train.py"
        script.write_text(textwrap.dedent(source))
        defaults = {"workers": [2], "methods": [], "with_xla": False, "timeout_seconds": 600}
        return measure([str(script)], **defaults | options)

    return run
