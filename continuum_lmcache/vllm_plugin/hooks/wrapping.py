"""Puts our functions in place of vLLM's, and marks them: `__wrapped__` may be any other plugin's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

MARK = "_continuum_hook"


def hook(owner: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put the function in place of the owner's function of that name, unless that is ours already: it has our
    mark, which a later functools.wraps by another plugin copies."""

    def replace(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        stock = getattr(owner, name)
        if not getattr(stock, MARK, False):
            functools.update_wrapper(function, stock)
            setattr(function, MARK, True)
            setattr(owner, name, function)
        return function

    return replace
