"""Shared by the console's tests: a run of the command, and a server that has only metrics."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from waiting import PATIENCE_S

from continuum_lmcache.console import metrics_page
from continuum_lmcache.console.app import main
from continuum_lmcache.console.metrics_page import MetricsPage, page_of


@dataclass(frozen=True)
class Ran:
    """A command's result."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Command:
    """`continuum-lmcache ARGUMENTS` in this process. It waits for a busy server longer than a user would."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Ran:
        self._capsys.readouterr()
        with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as ended:
            patched.setattr(metrics_page, "TIMEOUT_S", PATIENCE_S)
            main([str(a) for a in arguments])
        out, err = self._capsys.readouterr()
        return Ran(int(ended.value.code or 0), out, err)

    def refused(self, *arguments: object) -> str:
        """The one line that bad input prints."""
        ran = self(*arguments)
        assert (ran.status, ran.out) == (2, ""), ran
        (line,) = ran.err.splitlines()
        return line


def text_of(samples: Mapping[str, float]) -> str:
    """A page of metrics: each value by its name, with labels."""
    return "".join(f"{name} {value}\n" for name, value in samples.items())


def page_with(samples: Mapping[str, float]) -> MetricsPage:
    """The page of a server that has these metrics."""
    return page_of(text_of({"vllm:x": 1, **samples}), "http://h")


@contextmanager
def metrics_server(pages: Sequence[str], version: str = "") -> Iterator[str]:
    """Serves each page of /metrics once, the last one always; and what it says of its version, if that."""
    left = list(pages)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.path.partition("?")[0] == "/metrics"
            tells = bool(version) and self.path == "/version"
            self.send_response(200 if is_known or tells else 404)
            self.end_headers()
            if tells:
                self.wfile.write(version.encode())
            elif is_known:
                self.wfile.write((left.pop(0) if len(left) > 1 else left[0]).encode())

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))  # polls for its end so often, s
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
