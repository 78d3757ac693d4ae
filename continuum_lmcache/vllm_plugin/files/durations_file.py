"""Reads and writes the learned tool durations, which survive a restart (`continuum.tool_durations_file`)."""

from __future__ import annotations

import logging
from pathlib import Path

from continuum_lmcache.errors import DurationsError
from continuum_lmcache.tools.durations import ToolDurations
from continuum_lmcache.vllm_plugin.files import write_whole

logger = logging.getLogger(__name__)

MAX_BYTES = 64 << 20  # a full set of windows is about 5 MB


def load_durations(path: Path) -> ToolDurations:
    """The durations learned before. An unusable file is set aside with a warning, never an error.

    The names of set-aside files end in `.corrupt`; an older file of that name is replaced.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DurationsError(f"{path} is larger than {MAX_BYTES} bytes")
        return ToolDurations.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ToolDurations()
    except (DurationsError, UnicodeDecodeError) as error:
        set_aside(path, error)
    except OSError as error:
        logger.warning("Cannot read tool durations from %s (%s); starting without them", path, error)
    return ToolDurations()


def save_durations(path: Path, durations: ToolDurations) -> None:
    """Write all or nothing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, [durations.dumps()])


def set_aside(path: Path, error: Exception) -> None:
    aside = path.with_name(path.name + ".corrupt")
    try:
        path.replace(aside)
    except OSError as failed:
        logger.warning("Tool durations in %s are unusable (%s) and cannot be moved: %s", path, error, failed)
        return
    logger.warning("Tool durations in %s are unusable (%s); set aside as %s", path, error, aside)
