"""A headless Chromium, driven over a pipe by Chrome's DevTools protocol; standard library only.

The protocol: https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
).split()
# The browser reads its orders from descriptor 3 and answers on 4.
_WITH_PIPES = (
    "import fcntl, os, sys; orders, answers = (fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]); "
    "os.dup2(orders, 3); os.dup2(answers, 4); os.execvp(sys.argv[3], sys.argv[3:])"
)


def find_browser() -> str | None:
    """The path of a Chromium or Chrome of this machine, or `None`."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Page:
    """One page of a browser.

    Args:
      orders: descriptor to write to the browser.
      answers: descriptor to read from it.
    """

    def __init__(self, orders: int, answers: int) -> None:
        self._orders, self._answers = orders, answers
        self._number, self._read, self._session = 0, b"", ""
        target = self.order("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.order("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def order(self, method: str, **params: Any) -> Any:
        """Sends a command of the protocol and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._orders, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass  # events that nobody has asked for
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, url: str, *, width: int, height: int, before: str = "") -> None:
        """Opens a page.

        Args:
          url: its address.
          width: of the window, in CSS pixels.
          height: of the window.
          before: JavaScript to be run before the page's own.
        """
        self.order("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.order("Page.enable")
        self.order("Page.addScriptToEvaluateOnNewDocument", source=before)
        self.order("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON has it."""
        result = self.order("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def until(self, expression: str, seconds: float = 60.0) -> Any:
        """Waits until a JavaScript expression is true, and returns its value."""
        end = time.monotonic() + seconds
        while not (value := self.value(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"In vain for {seconds:g} s: {expression}. The page: {self._text()}")
            time.sleep(0.1)
        return value

    def screenshot(self, path: Path, **clip: float) -> None:
        """Writes a PNG of a part of the page: `x`, `y`, `width`, `height` in CSS pixels."""
        data = self.order("Page.captureScreenshot", format="png", clip={**clip, "scale": 1})["data"]
        path.write_bytes(base64.b64decode(data))

    def _text(self) -> str:
        return str(self.value("document.body ? document.body.innerText.slice(0, 2000) : ''"))

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + 60
        while b"\0" not in self._read:
            if not select.select([self._answers], [], [], max(end - time.monotonic(), 0))[0]:
                raise TimeoutError("The browser does not answer.")
            piece = os.read(self._answers, 1 << 20)
            if not piece:
                raise RuntimeError("The browser has ended.")
            self._read += piece
        message, _, self._read = self._read.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


@contextlib.contextmanager
def browser_page(browser: str) -> Iterator[Page]:
    """A page of a browser that is started for it, with a profile of its own, and ended after it.

    Args:
      browser: path of a Chromium or Chrome.
    """
    with contextlib.ExitStack() as undo:
        profile = undo.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        theirs, orders = os.pipe()
        undo.callback(os.close, orders)
        answers, their_answers = os.pipe()
        undo.callback(os.close, answers)
        command = [sys.executable, "-c", _WITH_PIPES, str(theirs), str(their_answers), browser, *_FLAGS]
        process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}"],
            pass_fds=(theirs, their_answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(their_answers)
        undo.callback(_end, process)
        yield Page(orders, answers)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
