"""Reports the blocks that vLLM counts as loaded and LMCache did not load.

LMCache 0.5.6 compares what it loads with what it requested itself (vllm_v1_adapter.py:876). It
reports neither a load that it skips nor tokens that it did not request. vLLM uses its own number, which it
passes to update_state_after_alloc. This module compares the loads with that number.

A step whose load failed computes on missing KV. vLLM discards its tokens and computes them again, but
LMCache would store what the step wrote under valid keys, and keep it. So nothing is stored of a request
that holds a block of a failed load, until that block was written again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from vllm.forward_context import ForwardContext
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger("vllm.continuum.lmcache")


class AwaitedLoad(NamedTuple):
    """Tokens [start, end) of one request, which vLLM counts as loaded within a step."""

    request_id: str
    start: int
    end: int
    block_ids: list[int]  # from token 0 on


def written_blocks(
    scheduler_output: SchedulerOutput, expected: Iterable[AwaitedLoad], trackers: Any, block_tokens: int
) -> set[int]:
    """The blocks that this step loads or computes from their first token on, by LMCache's RequestTrackers."""
    before = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    cached = scheduler_output.scheduled_cached_reqs
    before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    before |= {load.request_id: load.start for load in expected}
    found: set[int] = set()
    for request_id, computed in before.items():
        found.update(trackers[request_id].allocated_block_ids[-(-computed // block_tokens) :])
    return found


class LoadCheck:
    """Compares one worker's loads with what vLLM expects of them; wraps LMCache's engine for that."""

    def __init__(self, engine: Any, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._loaded_masks: dict[str, torch.Tensor] = {}  # by request: its tokens that this step loaded
        self._missing: set[int] = set()
        self._invalid_blocks: set[int] = set()  # blocks of failed loads that were not written since
        self._retrieve, engine.retrieve = engine.retrieve, self.retrieve

    def retrieve(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """LMCacheEngine.retrieve."""
        mask: torch.Tensor = self._retrieve(*args, **kwargs)
        self._loaded_masks[kwargs["req_id"]] = mask
        return mask

    def loaded(self, expected: Iterable[AwaitedLoad], written: Iterable[int]) -> None:
        """The step's loads have ended: note the blocks of all tokens that are missing.

        `written` are the blocks that the step writes from their first token on: these are valid again.
        """
        masks, self._loaded_masks = self._loaded_masks, {}
        self._invalid_blocks.difference_update(written)
        for load in expected:
            missing = self._missing_of(load, masks.get(load.request_id))
            self._missing |= missing
            self._invalid_blocks |= missing

    def missing_blocks(self) -> set[int]:
        """The blocks noted since the last call."""
        missing, self._missing = self._missing, set()
        return missing

    def is_whole(self, slots: torch.Tensor) -> bool:
        """Whether no slot is in a block that a failed load left invalid."""
        return not self._invalid_blocks or self._invalid_blocks.isdisjoint(
            (slots // self._block_tokens).tolist()
        )

    def _missing_of(self, load: AwaitedLoad, mask: torch.Tensor | None) -> set[int]:
        there = mask[: load.end].nonzero().view(-1).tolist() if mask is not None else []
        lost = set(range(load.start, load.end)).difference(there)
        if lost:
            logger.error(
                "LMCache did not load %d of %d tokens of request %s: their blocks are reported as invalid",
                len(lost),
                load.end - load.start,
                load.request_id,
            )
        return {load.block_ids[token // self._block_tokens] for token in lost}


def with_all_tokens(scheduler_output: SchedulerOutput) -> Any:
    """The step with all of each request's tokens, as LMCache needs it.

    vLLM's V2 model runner gets a preempted request as a new one. For a new request LMCache counts only
    the prompt, though its lookup had all tokens, and would load no more than the prompt
    (RequestTracker.from_new_request, vllm_v1_adapter.py:158).
    """
    new = [with_tokens(request) for request in scheduler_output.scheduled_new_reqs]
    return replace(scheduler_output, scheduled_new_reqs=new) if new else scheduler_output


def with_tokens(new: Any) -> Any:
    """A new request; if it is a resumed one, its generated tokens count as prompt."""
    is_resumed = new.prompt_token_ids and len(new.prefill_token_ids or ()) > len(new.prompt_token_ids)
    return replace(new, prompt_token_ids=list(new.prefill_token_ids)) if is_resumed else new


def with_attn_metadata(forward_context: ForwardContext) -> Any:
    """A context with attention metadata, without which LMCache does not load.

    vLLM's V2 model runner has none in the context of a step that replays a FULL CUDA graph, or of one that
    is split in two (gpu/model_runner.py:1889, 2003). LMCache would load nothing, without an error.
    """
    if forward_context.attn_metadata is not None:
        return forward_context
    context = copy.copy(forward_context)
    context.attn_metadata = {}
    return context
