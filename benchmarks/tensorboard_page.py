"""Runs TensorBoard on a free port of this host, and opens its page with the charts of some tags."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

_ADDRESS = re.compile(r"at (http://[0-9.]+:[0-9]+)/")
# The settings that a user makes on the page; the browser stores them.
_SETTINGS = {
    "timeSeriesSettingsPaneOpened": False,
    "stepSelectorEnabled": False,
    "sideBarWidthInPercent": 11,
    "scalarSmoothing": 0,
}
_TAGS = "card-view tb-truncated-path.tag"
_ALL_DRAWN = f"""() => {{
    const drawn = document.querySelectorAll('card-view line-chart canvas').length;
    return drawn > 0 && drawn == document.querySelectorAll('{_TAGS}').length;
}}"""


class Server:
    """A TensorBoard process.

    Args:
        process: Of the server.
        output: Its log.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", output: Path) -> None:
        self._process, self._output = process, output

    def address(self, seconds: float = 120.0) -> str:
        """Waits until the server answers, and returns its address."""
        return self._until(lambda: (found := _ADDRESS.search(self._output.read_text())) and found[1], seconds)

    def wait_for(self, tags: set[str], seconds: float = 120.0) -> None:
        """Waits until the server has read all of `tags`, in any run."""
        address = self.address(seconds)

        def has_all() -> bool:
            by_run = json.loads(_get(f"{address}/data/plugin/scalars/tags"))
            return tags <= {tag for of_run in by_run.values() for tag in of_run}

        self._until(has_all, seconds)

    def _until(self, condition: Callable[[], Any], seconds: float) -> Any:
        end = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > end or self._process.poll() is not None:
                raise RuntimeError(
                    f"TensorBoard ended or did not serve the data in time:\n{self._output.read_text()[-2000:]}"
                )
            time.sleep(0.1)
        return value


@contextlib.contextmanager
def serving(log_dir: Path) -> Iterator[Server]:
    """Starts a server without waiting for it, and ends it afterwards."""
    with contextlib.ExitStack() as undo:
        output = Path(undo.enter_context(tempfile.TemporaryDirectory()), "output")
        command = "--port=0 --host=127.0.0.1 --load_fast=false --reload_interval=1".split()
        process = subprocess.Popen(
            [sys.executable, "-m", "tensorboard.main", f"--logdir={log_dir}", *command],
            stdout=undo.enter_context(open(output, "wb")),
            stderr=subprocess.STDOUT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        undo.callback(process.wait)
        undo.callback(process.kill)  # SIGTERM would take long
        yield Server(process, output)


def open_charts(page: Page, address: str, tags: str) -> None:
    """Opens the time series and waits until the charts of all matching tags are drawn.

    Args:
        page: Opens the charts; those outside of its window are not drawn.
        address: Of the server.
        tags: A regular expression for the tags, as in the page's filter.
    """
    settings = json.dumps(json.dumps(_SETTINGS))
    url = f"{address}/?tagFilter={urllib.parse.quote(tags, safe='')}#timeseries"
    page.add_init_script(f"localStorage.setItem('_tb_global_settings', {settings})")
    page.goto("about:blank")  # otherwise a new filter would not reload the page
    page.goto(url)
    page.wait_for_function(_ALL_DRAWN)


def shown_tags(page: Page) -> list[str]:
    """Returns the tags of the charts on a page."""
    return [str(tag.get_attribute("title")) for tag in page.locator(_TAGS).all()]


def _get(url: str) -> str:
    no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with no_proxy.open(url, timeout=30) as answer:
        return answer.read().decode()
