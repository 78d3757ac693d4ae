"""Marks functions that this package has wrapped: `__wrapped__` may be any other plugin's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

MARK = "_continuum_hook"


def wraps(stock: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """functools.wraps, and the mark. A later functools.wraps by another plugin copies the mark."""

    def mark(hook: Callable[..., Any]) -> Callable[..., Any]:
        functools.update_wrapper(hook, stock)
        setattr(hook, MARK, True)
        return hook

    return mark


def is_hooked(function: Callable[..., Any]) -> bool:
    """Whether this function has our hook."""
    return getattr(function, MARK, False)
