"""Opens a page in a headless Chromium or Chrome of this machine."""

import contextlib
import shutil
from collections.abc import Iterator

from playwright.sync_api import Page, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = ("--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-proxy-server")


def find_browser() -> str | None:
    """Returns the path of a Chromium or Chrome of this machine, or `None`."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def browser_page(browser: str, *, width: int, height: int) -> Iterator[Page]:
    """Starts a browser with a new profile, yields a page of it, and closes the browser.

    Args:
        browser: Path of a Chromium or Chrome.
        width: Of the window, in CSS pixels.
        height: Of the window.
    """
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=browser, args=list(_FLAGS), chromium_sandbox=False)
        try:
            page = started.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(60_000)
            yield page
        finally:
            started.close()
