"""A real browser for tests: headless Chromium over its DevTools protocol, through two pipes.

It resolves no host name. What a page asked for and what its console said is kept.
"""

from __future__ import annotations

import base64
import io
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image
from waiting import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",  # commands come in on 3, answers and events go out on 4
    "--no-sandbox",  # root has none; the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
DEVICES = {"desk": (1280, 900, False), "phone": (390, 844, True)}  # CSS pixels; a finger in place of a mouse
FIRST = "document.querySelector(%s).getBoundingClientRect()"
LOUD = ("error", "warning", "assert")


class Box(NamedTuple):
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2


class Page:
    """One tab, in a profile of its own: whoever has it open was never there before.

    said: errors and warnings of its console. asked: the addresses that it asked for.
    """

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self.said: list[str] = []
        self.asked: list[str] = []
        self.answers: dict[str, int] = {}  # HTTP status by address
        self.loaded = False
        profile = browser.send("Target.createBrowserContext")
        target = browser.send("Target.createTarget", {"url": "about:blank", **profile})["targetId"]
        attached = browser.send("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]
        browser.pages[self._session] = self
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the DevTools protocol for this tab."""
        return self._browser.send(method, parameters, self._session)

    def heard(self, method: str, event: Mapping[str, Any]) -> None:
        """An event of this tab."""
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Network.requestWillBeSent":
            self.asked.append(event["request"]["url"])
        elif method == "Network.responseReceived":
            self.answers[event["response"]["url"]] = event["response"]["status"]
        elif method == "Runtime.exceptionThrown":
            self.said.append(json.dumps(event["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and event["type"] in LOUD:
            self.said.append(json.dumps(event["args"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in LOUD:
            self.said.append(json.dumps(event["entry"]))

    def open(self, address: str) -> None:
        """Go there, and wait until all of it has loaded and two frames were drawn."""
        self.loaded = False
        gone = self.send("Page.navigate", url=address)
        assert "errorText" not in gone, f"{address}: {gone['errorText']}"
        while not self.loaded:
            self._browser.listen()
        self.settle()

    def settle(self) -> None:
        """Let the page react to what happened to it: two frames."""
        self.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def js(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; a promise's when it is kept."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        end_s = time.monotonic() + PATIENCE_S
        while not self.js(f"!!({condition})"):
            assert time.monotonic() < end_s, f"never within {PATIENCE_S:.0f} s: {condition}"
            time.sleep(0.02)

    def shown_on(self, device: str, scheme: str = "light") -> None:
        """On a device, with the colours that its user prefers: light or dark."""
        width, height, has_fingers = DEVICES[device]
        self.send("Page.bringToFront")  # a tab behind another draws no frames
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": has_fingers}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Emulation.setTouchEmulationEnabled", enabled=has_fingers)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.send("Emulation.setEmulatedMedia", features=[feature])
        self.settle()

    def mouse(self, event: str, x: float, y: float, **more: Any) -> None:
        """moved, pressed, released; or the wheel."""
        self.send("Input.dispatchMouseEvent", type=f"mouse{event}", x=x, y=y, **more)

    def touch(self, begin: tuple[float, float], end: tuple[float, float], moves: int = 8) -> None:
        """A finger goes down, moves in a straight line, and goes up."""
        (x0, y0), (x1, y1) = begin, end
        for n in range(moves + 1):
            point = {"x": x0 + (x1 - x0) * n / moves, "y": y0 + (y1 - y0) * n / moves}
            kind = "touchMove" if n else "touchStart"
            self.send("Input.dispatchTouchEvent", type=kind, touchPoints=[point])
        self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def box(self, selector: str) -> Box:
        """Where the first element that a selector finds lies in the window, CSS pixels."""
        found = self.js(f"(box => [box.x, box.y, box.width, box.height])({FIRST % json.dumps(selector)})")
        return Box(*found)

    def picture(self, selector: str, around: int = 0) -> Image.Image:
        """An element as it is seen, and so many pixels on each side."""
        x, y, width, height = self.box(selector)
        scrolled_x, scrolled_y = self.js("[scrollX, scrollY]")
        clip = {"x": x + scrolled_x - around, "y": y + scrolled_y - around}
        clip |= {"width": width + 2 * around, "height": height + 2 * around, "scale": 1}
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")

    def contrast(self, selector: str, around: int = 0) -> float:
        """WCAG's contrast ratio of an element's most frequent colour and the one that differs most."""
        picture = self.picture(selector, around)
        colours = picture.getcolors(picture.width * picture.height) or []
        shades = {luminance(colour): count for count, colour in sorted(colours)}  # type: ignore[arg-type]
        ground = max(shades, key=shades.__getitem__)
        return max((max(ground, shade) + 0.05) / (min(ground, shade) + 0.05) for shade in shades)


def luminance(colour: tuple[int, int, int]) -> float:
    """WCAG's relative luminance of an sRGB colour."""
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


class Browser:
    """One process of Chromium."""

    def __init__(self, command: str, profile: Path) -> None:
        self.pages: dict[str, Page] = {}
        self._last, self._heard = 0, b""
        self._answers: dict[int, dict[str, Any]] = {}
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        begin = f"import os, sys; os.dup2({theirs_in}, 3); os.dup2({theirs_out}, 4)"
        begin += "; os.execv(sys.argv[1], sys.argv[1:])"
        self._log = (profile / "log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-c", begin, command, f"--user-data-dir={profile}", *FLAGS],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "HOME": str(profile)},
        )
        os.close(theirs_in)
        os.close(theirs_out)

    def send(self, method: str, parameters: Mapping[str, Any] = {}, session: str = "") -> dict[str, Any]:  # noqa: B006
        """A command's result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while self._last not in self._answers:
            self.listen()
        answer = self._answers.pop(self._last)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def listen(self) -> None:
        """Read what Chromium says next."""
        ready, _, _ = select.select([self._in], [], [], PATIENCE_S)
        assert ready, f"Chromium said nothing for {PATIENCE_S:.0f} s"
        read = os.read(self._in, 1 << 20)
        assert read, f"Chromium ended: {Path(self._log.name).read_text(errors='replace')[-2000:]}"
        *whole, self._heard = (self._heard + read).split(b"\0")
        for message in map(json.loads, whole):
            if "id" in message:
                self._answers[message["id"]] = message
            elif (page := self.pages.get(message.get("sessionId", ""))) is not None:
                page.heard(message["method"], message["params"])

    def close(self) -> None:
        self.send("Browser.close")
        self._process.wait(timeout=PATIENCE_S)
        for fd in (self._in, self._out):
            os.close(fd)
        self._log.close()


def opens_any_file(command: str) -> bool:
    """Whether it is no snap, as Ubuntu's Chromium: that sees no file of ours."""
    said = subprocess.run([command, "--version", "--no-sandbox"], capture_output=True, text=True, timeout=60)
    return said.returncode == 0 and "snap" not in said.stdout


@contextmanager
def browser() -> Iterator[Browser]:
    """Chromium, or a skip that says how to have it."""
    command = next((found for found in map(shutil.which, NAMES) if found and opens_any_file(found)), None)
    if command is None:
        pytest.skip(f"none of {', '.join(NAMES)} is on PATH: apt install chromium (Debian)")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        running = Browser(command, Path(profile))
        try:
            yield running
        finally:
            running.close()
