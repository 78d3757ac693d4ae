"""Prompts whose KV can be named without hashing a token.

Every token is the number of its stream. Two prompts that agree on a token and its position agree on
all before it: a program has one stream, and begins a new one where its prompt leaves its history.
So (last token, end) names a block or a chunk as a hash over the prefix would, at no cost.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from connectors.tier_model import ChunkName

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request

    from experiments.workload import TurnSpec

SYSTEM = 0  # the stream of the prompt that all programs share


def stream_names(
    token_ids: Sequence[int],
    chunk_tokens: int,
    salt: str = "",  # noqa: ARG001
    known: Sequence[Any] = (),
) -> list[ChunkName]:
    """Names of the whole chunks (connectors.tier_model.Namer)."""
    first = (len(known) + 1) * chunk_tokens
    ends = range(first, len(token_ids) + 1, chunk_tokens)
    return [*known, *((token_ids[end - 1], end) for end in ends)]


def block_hasher(block_tokens: int) -> Callable[[Request], list[BlockHash]]:
    """vLLM's block hashes of a request's new whole blocks, named by stream."""

    def hashes(request: Request) -> list[BlockHash]:
        tokens = request.all_token_ids
        first = (len(request.block_hashes) + 1) * block_tokens
        ends = range(first, len(tokens) + 1, block_tokens)
        return [struct.pack("<qq", tokens[end - 1], end) for end in ends]  # type: ignore[misc]

    return hashes


@dataclass(slots=True)
class History:
    """One program's conversation so far, as tokens."""

    streams: Iterator[int]  # of numbers that no other program uses
    shared_tokens: int  # of the first prompt: the system prompt
    tokens: list[int] = field(default_factory=list)
    stream: int = SYSTEM

    def prompt(self, turn: TurnSpec) -> list[int]:
        """The turn's prompt; the history then ends with it."""
        if not self.tokens:
            shared = min(self.shared_tokens, turn.input_tokens)
            self.tokens = [SYSTEM] * shared
            self.stream = next(self.streams)
            new = turn.input_tokens - shared
        else:
            if turn.kept_tokens < len(self.tokens):
                del self.tokens[turn.kept_tokens :]
                self.stream = next(self.streams)
            new = turn.new_tokens
        self.tokens += [self.stream] * new
        return list(self.tokens)

    def said(self, output_tokens: int) -> None:
        """The model answered."""
        self.tokens += [self.stream] * output_tokens


def new_streams() -> Iterator[int]:
    """Numbers for `History.streams`, shared by the programs of one run."""
    return count(SYSTEM + 1)
