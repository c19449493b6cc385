"""A page of the Chromium or Chrome that this machine has, headless."""

import contextlib
import shutil
from collections.abc import Iterator

from playwright.sync_api import Page, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = ("--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-proxy-server")


def find_browser() -> str | None:
    """The path of a Chromium or Chrome of this machine, or `None`."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def browser_page(browser: str, *, width: int, height: int) -> Iterator[Page]:
    """A page of a browser that is started for it, with a profile of its own, and ended after it.

    Args:
      browser: path of a Chromium or Chrome.
      width: of the window, in CSS pixels.
      height: of the window.
    """
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=browser, args=list(_FLAGS), chromium_sandbox=False)
        try:
            page = started.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(60_000)
            yield page
        finally:
            started.close()
