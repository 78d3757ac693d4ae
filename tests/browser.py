"""A real headless Chromium, driven over WebDriver's HTTP (W3C), as far as the report's tests need it."""

from __future__ import annotations

import shutil
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import PATIENCE_S, wait_for

from experiments.server import reserved_port

FLAGS = (  # without the last five it looks for its maker's hosts, which tests must not
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1400",
)
DOWN, UP = {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}


class Browser:
    """One session."""

    def __init__(self, session: str) -> None:
        self._session = session

    def ask(self, what: str, **body: Any) -> Any:
        answer = httpx.post(f"{self._session}/{what}", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def open(self, page: Path) -> None:
        self.ask("url", url=page.resolve().as_uri())

    def run(self, script: str) -> Any:
        """Run a script and return its value."""
        return self.ask("execute/sync", script=script, args=[])

    def drag(self, start: tuple[int, int], by: tuple[int, int]) -> None:
        """With the left button, from a point of the window, as a user zooms."""
        end = {"type": "pointerMove", "x": start[0] + by[0], "y": start[1] + by[1], "duration": 200}
        self.point(start, DOWN, end, UP)

    def double_click(self, at: tuple[int, int]) -> None:
        self.point(
            at, DOWN, UP, {"type": "pause", "duration": 80}, DOWN, UP, {"type": "pause", "duration": 500}
        )

    def point(self, at: tuple[int, int], *then: dict[str, Any]) -> None:
        """Move the mouse there."""
        moves = [{"type": "pointerMove", "x": at[0], "y": at[1]}, *then]
        self.ask("actions", actions=[{"type": "pointer", "id": "mouse", "actions": moves}])

    def complaints(self) -> list[str]:
        """The console's messages: script errors, and requests that the page's policy refused."""
        return [entry["message"] for entry in self.ask("se/log", type="browser")]

    def screenshot(self, path: Path) -> None:
        answer = httpx.get(f"{self._session}/screenshot", timeout=PATIENCE_S)
        path.write_bytes(b64decode(answer.json()["value"]))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Chromium with a new profile; the test is skipped where there is none."""
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or chromium is None:
        pytest.skip("no chromium and chromedriver (Debian: chromium, chromium-driver)")
    port = reserved_port()
    process = subprocess.Popen(
        [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: is_ready(url), "chromedriver is ready", every_s=0.1)
        options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = httpx.post(
            f"{url}/session", json={"capabilities": {"alwaysMatch": wanted}}, timeout=PATIENCE_S
        )
        assert answer.status_code == 200, answer.text
        session = f"{url}/session/{answer.json()['value']['sessionId']}"
        try:
            yield Browser(session)
        finally:
            httpx.delete(session, timeout=PATIENCE_S)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def is_ready(url: str) -> bool:
    try:
        return bool(httpx.get(f"{url}/status", timeout=PATIENCE_S).json()["value"]["ready"])
    except httpx.TransportError:
        return False
