"""The files that an engine reads and writes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from pathlib import Path

_drafts = itertools.count()


def write_whole(path: Path, texts: Iterable[str]) -> None:
    """Write a file that only its owner reads, all or nothing: a reader sees the old file or the new one.

    A signal handler may interrupt another call, so each has its own draft. Returns when the file is on the
    disk. Raises OSError; then no draft is left.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}-{next(_drafts)}.tmp")
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(texts)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
