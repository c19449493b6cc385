"""Takes the picture of TensorBoard for the documentation: the curves of a training that loses workers.

    python benchmarks/screenshot.py                writes docs/images/tensorboard.png
    python benchmarks/screenshot.py --logs run/logs --output picture.png

Needs Chromium or Chrome. Without `--logs` it first runs `examples/monitoring.py` on two workers, one of which is killed
three times.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.browser import browser_page, find_browser  # noqa: E402
from benchmarks.tensorboard_page import open_charts, serving  # noqa: E402

_TRAINING = "run --workers 2 --min-workers 1 --max-restarts 3"
_KILLS = "--epochs=18 --kill_at_steps=90,180,290"
_TAGS = "tfdist/(?!de|repl)"  # nine charts, three in a row
_WIDTH, _HEIGHT = 1500, 1150


def take(logs: Path, output: Path, browser: str) -> None:
    """Writes a picture of the charts of `logs`."""
    with serving(logs) as server:
        server.wait_for({"tfdist/step_ms"})
        with browser_page(browser, width=_WIDTH, height=_HEIGHT) as page:
            open_charts(page, server.address(), _TAGS)
            page.wait_for_timeout(2000)  # until the lines have been painted
            page.screenshot(path=output)


def main() -> int:
    """Trains if no logs are given, and takes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, help="logs of an earlier training")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "tensorboard.png")
    options = parser.parse_args()
    browser = find_browser()
    if browser is None:
        print("No browser was found. Expected: chromium or google-chrome on the PATH. Install one.", file=sys.stderr)
        return 1
    if options.logs is not None:
        take(options.logs, options.output, browser)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        script = ROOT / "examples" / "monitoring.py"
        command = [sys.executable, "-m", "tfdist.launch", *_TRAINING.split(), str(script), f"--directory={directory}"]
        subprocess.run([*command, *_KILLS.split()], check=True, cwd=ROOT)
        take(Path(directory, "logs"), options.output, browser)
    return 0


if __name__ == "__main__":
    sys.exit(main())
