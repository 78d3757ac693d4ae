"""Prefill and step times of a real vLLM engine, one `LLMEngine.step()` at a time.

The engine runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0) and synchronously, so that a step
is a step. A context is computed once and then found in vLLM's prefix cache; what follows it is
random and new each time, and how much was found is checked for every timing.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from continuum_lmcache.errors import ProfileError
from profiles.cpu_environment import CPU_ENV
from profiles.timing import timed

ENGINE_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
CPU_THREADS = 1  # as servers with CPU_ENV have; a second one waits for the first by spinning
DECODE_TOKENS = 100_000  # a decoding request does not end by itself


@dataclass(frozen=True, slots=True)
class KvShape:
    layers: int
    bytes_per_token: int  # of all layers
    block_tokens: int
    dtype: torch.dtype  # of a value


class Engine:
    """A vLLM engine that is asked to compute exactly this many tokens after that many."""

    def __init__(
        self,
        model: Path,
        longest_tokens: int,
        chunk_tokens: int,
        batch: int,
        load_format: str = "auto",
        dtype: str = "bfloat16",
    ) -> None:
        from vllm import LLM
        from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        os.environ.update(ENGINE_ENV | (CPU_ENV if on_cpu else {}))
        if on_cpu:  # in this process vLLM does not bind its threads as CPU_ENV says
            torch.set_num_threads(CPU_THREADS)
        llm = LLM(
            str(model),
            load_format=load_format,
            dtype=dtype,
            enforce_eager=on_cpu,
            max_model_len=longest_tokens,
            max_num_batched_tokens=chunk_tokens + batch,
            max_num_seqs=batch + 1,
            enable_prefix_caching=True,
            async_scheduling=False,
            distributed_executor_backend="uni",
            seed=0,
        )
        self._engine = llm.llm_engine
        self._draw, self._ids = random.Random(0), map(str, itertools.count())
        self._contexts: dict[int, list[int]] = {}
        self._vocab = self._engine.model_config.get_vocab_size()

    @property
    def kv_shape(self) -> KvShape:
        """Raises ProfileError for a model whose KV is not one K and one V per head."""
        config = self._engine.vllm_config
        model = config.model_config
        if model.use_mla:
            raise ProfileError("models with latent attention (MLA) are not measured yet")
        layers = model.get_num_layers(config.parallel_config)
        heads = model.get_num_kv_heads(config.parallel_config)
        token_bytes = 2 * layers * heads * model.get_head_size() * model.dtype.itemsize
        return KvShape(layers, token_bytes, config.cache_config.block_size, model.dtype)

    @property
    def kv_tokens(self) -> int:
        cache = self._engine.vllm_config.cache_config
        return int(cache.num_gpu_blocks * cache.block_size)

    def prefill(self, tokens: int, context_tokens: int) -> float:
        """From the request to its first token. `context_tokens` must fill blocks."""
        for _ in range(2):  # the second time if the context had been evicted
            name = self._ask(self._context(context_tokens) + self._fresh(tokens), output_tokens=1)
            took_s, found = timed(self._until_done, name)
            if found[-1].num_cached_tokens == context_tokens:
                return took_s
        raise ProfileError(
            f"of a context of {context_tokens} tokens vLLM found {found[-1].num_cached_tokens}: "
            f"contexts must fill blocks of {self.kv_shape.block_tokens} tokens and fit the KV cache"
        )

    def start_decoding(self, batch: int, context_tokens: int) -> list[str]:
        """`batch` requests, each with a context of its own, that generate until they are stopped."""
        self._context(context_tokens)  # which the chunks beside them will follow
        names = [self._ask(self._fresh(context_tokens), DECODE_TOKENS) for _ in range(batch)]
        waiting = set(names)
        while waiting:
            waiting -= {output.request_id for output in self._engine.step()}
        return names

    def stop(self, names: Sequence[str]) -> None:
        self._engine.abort_request(list(names))
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def step(self, chunk_tokens: int, context_tokens: int) -> float:
        """One step of all that decodes, with a chunk of another prompt that has a context, or none."""
        if not chunk_tokens:
            return timed(self._engine.step)[0]
        name = self._ask(self._context(context_tokens) + self._fresh(chunk_tokens), output_tokens=1)
        took_s, done = timed(self._engine.step)
        if name not in {output.request_id for output in done}:
            raise ProfileError(f"a chunk of {chunk_tokens} tokens did not fit one step")
        return took_s

    def _ask(self, prompt: list[int], output_tokens: int) -> str:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True, detokenize=False, temperature=0)
        name = next(self._ids)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def _until_done(self, name: str) -> list[Any]:
        while True:
            outputs = self._engine.step()
            if name in {output.request_id for output in outputs}:
                return outputs

    def _context(self, tokens: int) -> list[int]:
        """The head of this many tokens for every timing at this context."""
        if tokens and tokens not in self._contexts:
            self._contexts[tokens] = self._fresh(tokens)
            self._until_done(self._ask(self._contexts[tokens], output_tokens=1))
        return self._contexts.get(tokens, [])

    def _fresh(self, tokens: int) -> list[int]:
        """Token ids that no cache has seen; the lowest ids are special in most vocabularies."""
        return [self._draw.randrange(min(256, self._vocab // 2), self._vocab) for _ in range(tokens)]
