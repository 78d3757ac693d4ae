"""Checks that every token equals the model's in plain PyTorch without a cache.

    python -m experiments.gpu_check --only exact       # in float32, on a GPU or a CPU; rounding: in bfloat16

A real vLLM engine with `--scheduling-policy continuum` and LMCache runs in this process, with far too little
memory: turns hit the GPU's cache, DRAM and the disk, are evicted, preempted and loaded again, and repeat a
prompt that is cached whole. Then the same weights in the transformers library, in float32, without vLLM and
without a cache, give the log probability that every generated token should have had. A turn's error is the
mean of its tokens' errors.

    roomy     in bfloat16 alone: no connector, enough KV for all: the effect of rounding
    pressed   LMCache's server with DRAM and a disk, too little of everything; or vLLM's own offloading
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from experiments.server import CPU_ENV, GPU_ENV, reserved_port
from experiments.tiny_model import KV_BYTES_PER_TOKEN, MODELS, make_model

WORK = Path(__file__).parents[1] / ".work"
CHUNK = 256  # LMCache's
DRAM_CHUNKS = 32  # L1 keeps half of them free, and what it loads from disk must fit there
FIRST_TOKENS, OUTPUT_TOKENS = 2 * CHUNK + 118, 40  # an output needs a block that the prompt did not
WHOLE_TOKENS = 2 * CHUNK
TURNS = 3
MOST_AT_TOOLS = 2
REST_STEPS = 40
PROGRAMS = 8  # at once
ROOMY_TOKENS = PROGRAMS * 2048
EVICTED_S = 1.1  # LMCache's server evicts once a second; on a GPU a program is over by then
EXACT = {"cpu": 1e-3, "cuda": 2e-2}  # in float32, how far a log probability may be off; GPUs round matmuls
SOFT = {"tiny-gpt-oss": 1e-2}  # the least bound of models that round more: without any tier 0.0026
ROUNDING = 2.0  # in bfloat16: times the roomy run's worst turn
LMCACHE, NATIVE = "lmcache", "native"  # below the GPU; vLLM's own has a worker for GPUs alone
WAYS = {LMCACHE: ("gpu", "dram", "ssd", "preemptions"), NATIVE: ("gpu", "dram", "preemptions")}
RETRIED = 3  # every so many programs, one with a first prompt of whole chunks repeats it exactly


@dataclass(frozen=True, slots=True)
class Kind:
    """Settings of an engine on one kind of device."""

    device: str  # as torch names it
    kv_tokens: int  # so few that running turns run out of blocks, and are preempted
    options: Mapping[str, Any]  # of vllm.LLM
    env: Mapping[str, str]


CPU = Kind(
    "cpu",
    28 * 128,
    {"enforce_eager": True, "distributed_executor_backend": "mp"},
    {k: v for k, v in CPU_ENV.items() if k != "VLLM_CPU_KVCACHE_SPACE"}
    | {"VLLM_WORKER_MULTIPROC_METHOD": "fork"},
)
GPU = Kind(
    "cuda",
    227 * 16,  # four second turns' prompts, and no more than one of their outputs
    {"gpu_memory_utilization": 0.1},
    {
        **GPU_ENV,
        "TRITON_F32_DEFAULT": "ieee",  # else Triton's attention multiplies float32 as TF32
        "CONTINUUM_STATIC_TTL_S": "0.1",  # as many steps as SETTINGS' on a CPU
    },
)
KINDS = {kind.device: kind for kind in (CPU, GPU)}
OPTIONS = {  # of vllm.LLM, by model
    "tiny-qwen3-next": {
        "block_size": 128,  # vLLM takes 80 on a GPU, and LMCache's chunk is no multiple of it
        "additional_config": {"gdn_prefill_backend": "triton"},  # FlashInfer compiles its own for minutes
    },
}
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "CONTINUUM_POLICY": "experiments.policies:always_loads",  # it is loads that are judged here
    "CONTINUUM_STATIC_TTL_S": "1",
}


@dataclass(slots=True)
class Conversation:
    """A program's prompts and outputs, and the log probability of each of its output tokens."""

    tokens: list[int]
    logprobs: dict[int, float] = field(default_factory=dict)  # by position in `tokens`
    turns: int = 0


def below(tier: str, disk: Path, dtype: str, is_hybrid: bool = False) -> dict[str, Any]:
    """The engine's options for what is below the GPU: too small for all, so that it all takes part.

    `is_hybrid`: its layers keep windows or states, which they do with LMCacheMPConnector alone, and which
    LMCache's server alone copies.
    """
    chunk_gib = CHUNK * KV_BYTES_PER_TOKEN[dtype] / 2**30
    if tier == NATIVE:
        return {"kv_offloading_size": DRAM_CHUNKS * chunk_gib}
    from vllm.config import KVTransferConfig

    extra = {
        "lmcache.mp.autostart": True,
        "lmcache.mp.port": reserved_port(),
        "lmcache.max_local_cpu_size": DRAM_CHUNKS * chunk_gib,
        "lmcache.local_disk": f"file://{disk}/",
        "lmcache.max_local_disk_size": 2,
    }
    if is_hybrid:
        extra["lmcache.mp.mp_transfer_mode"] = "lmcache_driven"  # a GPU's; on a CPU by shared memory
    connector = "LMCacheMPConnector" if is_hybrid else "LMCacheConnectorV1"
    config = KVTransferConfig(kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra)
    return {"kv_transfer_config": config}


def engine(
    options: Mapping[str, Any],
    kind: Kind = CPU,
    dtype: str = "float32",
    kv_tokens: int | None = None,
    model: str = "tiny-model",
) -> Any:
    """An LLM of one of MODELS with these options beside the kind's own.

    The environment has SETTINGS and the kind's. `kv_tokens` is its cache's capacity, by default the kind's.
    """
    from vllm import LLM

    longest_tokens = 2048
    kv_tokens = kind.kv_tokens if kv_tokens is None else kv_tokens
    kv_bytes = max(kv_tokens, longest_tokens) * KV_BYTES_PER_TOKEN[dtype]
    return LLM(
        str(make_model(WORK / model, config=MODELS[model])),
        dtype=dtype,
        max_model_len=longest_tokens,
        kv_cache_memory_bytes=kv_bytes,  # else vLLM measures what others on this GPU take meanwhile
        disable_log_stats=False,
        **{"scheduling_policy": "continuum", **kind.options, **OPTIONS.get(model, {}), **options},
    )


def play(llm: Any, programs: int, seed: int, rest_s: float = 0.0) -> list[Conversation]:
    """All programs at once. Of those at a tool, more than MOST_AT_TOOLS or all that are left, any returns.

    After every REST_STEPS steps the engine waits for `rest_s`.

    Some are asked their first question again, by a program of its own: their prompt is found whole, and
    one token of it is computed.
    """
    draw = random.Random(seed)
    first_tokens = (FIRST_TOKENS if i % RETRIED else WHOLE_TOKENS for i in range(programs))
    conversations = {f"{seed}-{i}": Conversation(drawn(draw, n)) for i, n in enumerate(first_tokens)}
    names = {send(llm, name, conversation): name for name, conversation in conversations.items()}
    at_tool: list[str] = []
    steps = itertools.count(1)
    while at_tool or llm.llm_engine.has_unfinished_requests():
        if next(steps) % REST_STEPS == 0:
            time.sleep(rest_s)
        for out in llm.llm_engine.step():
            if not out.finished:
                continue
            name = names[out.request_id]
            conversation = conversations[name]
            if conversation.turns == 0 and len(conversation.tokens) == WHOLE_TOKENS:
                conversations[f"{name}-again"] = Conversation(list(conversation.tokens), turns=TURNS - 1)
                at_tool.append(f"{name}-again")
            append_output(conversation, out.outputs[0])
            if conversation.turns < TURNS:
                conversation.tokens += drawn(draw, CHUNK - OUTPUT_TOKENS)
                at_tool.append(name)
        while len(at_tool) > MOST_AT_TOOLS or (at_tool and not llm.llm_engine.has_unfinished_requests()):
            name = at_tool.pop(draw.randrange(len(at_tool)))
            names[send(llm, name, conversations[name])] = name
    return list(conversations.values())


def play_all_ways(
    llm: Any, programs: int, ways: Collection[str], rest_s: float = 0.0, most_rounds: int = 8
) -> list[Conversation]:
    """Rounds with other seeds until prompts have come in all `ways` (sources), or `most_rounds` are over."""
    conversations: list[Conversation] = []
    for seed in range(most_rounds):
        conversations += play(llm, programs, seed, rest_s)
        if all(sources(llm)[way] for way in ways):
            break
    return conversations


def drawn(draw: random.Random, tokens: int) -> list[int]:
    return [draw.randrange(300, 4000) for _ in range(tokens)]


def send(llm: Any, name: str, conversation: Conversation) -> str:
    """Queue a program's next turn; the request's id."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    fields = {"job_id": name, "is_last_step": conversation.turns == TURNS - 1}
    params = SamplingParams(
        temperature=0, max_tokens=OUTPUT_TOKENS, logprobs=0, ignore_eos=True, extra_args=fields
    )
    request = f"{name}-{conversation.turns}"
    llm.llm_engine.add_request(request, TokensPrompt(prompt_token_ids=list(conversation.tokens)), params)
    return request


def append_output(conversation: Conversation, output: Any) -> None:
    """Add a turn's output to the conversation."""
    for token, step in zip(output.token_ids, output.logprobs, strict=True):
        conversation.logprobs[len(conversation.tokens)] = step[token].logprob
        conversation.tokens.append(token)
    conversation.turns += 1


def reference(device: str = "cpu", name: str = "tiny-model") -> Any:
    """The same weights in float32, without vLLM."""
    from transformers import AutoModelForCausalLM

    model = make_model(WORK / name, config=MODELS[name])
    return AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).eval().to(device)


def off_by(conversation: Conversation, model: Any) -> list[float]:
    """The difference of each generated token's log probability to the reference, in order."""
    return [off for off, _ in judged(conversation, model)]


@torch.inference_mode()
def judged(
    conversation: Conversation, model: Any, allowed: Sequence[int] | None = None
) -> list[tuple[float, float]]:
    """The same, and how far the token is below the reference's most likely one (of those allowed)."""
    logits = model(torch.tensor([conversation.tokens], device=model.device)).logits[0]
    scores = torch.log_softmax(logits, dim=-1).cpu()
    found = []
    for at, logprob in conversation.logprobs.items():
        own = scores[at - 1, conversation.tokens[at]].item()
        best = scores[at - 1] if allowed is None else scores[at - 1, list(allowed)]
        found.append((abs(own - logprob), best.max().item() - own))
    return found


def sources(llm: Any) -> Counter[str]:
    """Where prompts came from: tokens by tier, and preemptions.

    These are the recorder's: the engine must have a `continuum.run_output_dir`.
    """
    parts = llm.llm_engine.engine_core.engine_core.scheduler._parts
    found = Counter(parts.residency.prompt_tokens)
    for event in itertools.chain.from_iterable(parts.files.recorder.snapshot().values()):
        found["preemptions"] += "Request_evicted_from_running_queue_time" in event
    return found


def checked(
    device: str, dtype: str, folder: Path, tier: str = LMCACHE, model: str = "tiny-model"
) -> dict[str, Any]:
    """One dtype on "cpu" or "cuda". `failed` has the problems; "" if nothing is."""
    kind = KINDS[device]
    os.environ.update(SETTINGS | dict(kind.env))
    played: dict[str, list[Conversation]] = {}
    if dtype != "float32":
        llm = engine({}, kind, dtype, ROOMY_TOKENS, model)
        played["roomy"] = play(llm, PROGRAMS, seed=0)
        llm.llm_engine.engine_core.shutdown()
        del llm
    with ExitStack() as until:
        # An engine that is not shut down may still write there.
        folder_of_run = TemporaryDirectory(dir=folder, prefix="disk-", ignore_cleanup_errors=True)
        disk = Path(until.enter_context(folder_of_run)).resolve()
        os.environ["CONTINUUM_RUN_OUTPUT_DIR"] = str(disk / "run")
        llm = engine(below(tier, disk, dtype, model != "tiny-model"), kind, dtype, model=model)
        until.callback(llm.llm_engine.engine_core.shutdown)
        played["pressed"] = play_all_ways(llm, PROGRAMS, WAYS[tier], EVICTED_S if device == "cuda" else 0.0)
        found = sources(llm)
    plain = reference(device, model)
    figures = {name: figures_of(turns_off(of, plain)) for name, of in played.items()}
    missing = [way for way in WAYS[tier] if not found[way]]
    failed = [f"no prompt came by way of: {', '.join(missing)}"] if missing else []
    exact = max(EXACT[device], SOFT.get(model, 0.0))
    failed += wrong(figures, exact if dtype == "float32" else None)
    return {"dtype": dtype, "tier": tier, "ways": dict(found), **figures, "failed": "; ".join(failed)}


def turns_off(conversations: Sequence[Conversation], model: Any) -> list[list[float]]:
    """The error of each turn's tokens."""
    found = []
    for conversation in conversations:
        tokens = off_by(conversation, model)
        found += [tokens[at : at + OUTPUT_TOKENS] for at in range(0, len(tokens), OUTPUT_TOKENS)]
    return found


def figures_of(turns: Sequence[Sequence[float]]) -> dict[str, float]:
    tokens = sorted(off for turn in turns for off in turn)
    return {
        "turns": len(turns),
        "tokens": len(tokens),
        "median": median(tokens),
        "worst_token": tokens[-1],
        "worst_turn": max(fmean(turn) for turn in turns),
    }


def wrong(figures: Mapping[str, Mapping[str, float]], exact: float | None) -> list[str]:
    """The problems found. `exact`: the bound of a token's error in float32; None: that of rounding."""
    pressed = figures["pressed"]
    if exact is not None:
        is_off = pressed["worst_token"] >= exact
        return [f"a token is off by {pressed['worst_token']:.2g}, {exact:g} is rounding"] if is_off else []
    bound = ROUNDING * figures["roomy"]["worst_turn"]
    if pressed["worst_turn"] <= bound:
        return []
    mean = f"{pressed['worst_turn']:.2g}"
    return [f"a turn's tokens are off by {mean} on average; twice what rounding does is {bound:.2g}"]
