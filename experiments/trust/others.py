"""Parts of vLLM that this package does not know, on stock vLLM and beside `continuum`: is every token right?

    python -m experiments.trust.others                     # every row, a quarter of an hour on a CPU
    python -m experiments.trust.others drafts ExampleConnector

A row is a KV connector that is none of ours, or n-gram drafts. Each runs on both in an engine of its own, on
prompts that are asked three times with little memory. Every token is compared with the model's in plain
PyTorch, in float32.

`wrong` counts the tokens that are off, `warned` how often the log says that the connector does not report
where KV is. Where no engine starts there is the reason in place of figures. LMCache in vLLM's process has no
part for a CPU: it keeps nothing (`degraded`), and each lookup waits for 3 s (`waits`), on stock vLLM too.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from experiments.demo_servers import FCFS as LMCACHES_MP
from experiments.exactness import (
    CPU,
    EXACT,
    OUTPUT_TOKENS,
    SETTINGS,
    Conversation,
    drawn,
    engine,
    judged,
    reference,
)
from experiments.forking_vllm import fork_from_now_on
from experiments.mp_server import serve_mp
from experiments.server import unwind_on_sigterm

FORKING = multiprocessing.get_context("fork")
STOCK, OURS = "fcfs", "continuum"
ROUNDS, PROMPTS, PROMPT_TOKENS, KV_TOKENS = 3, 6, 700, 28 * 128
DRAFTS = "drafts"
IN_PROCESS = "LMCacheConnectorV1"  # both of LMCache by their paths: their plain names give ours
IN_PROCESS_PATH = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector"
OVER_SERVER = "LMCacheMPConnector"
SIMPLE, ITS_MODULE = "SimpleOnCpuConnector", "experiments.trust.simple_on_cpu"
NAMES = (
    *("ExampleConnector", "MultiConnector", "SimpleCPUOffloadConnector", SIMPLE, "NixlConnector"),
    *("MooncakeStoreConnector", IN_PROCESS, OVER_SERVER, DRAFTS),
)
DRAM_GIB = 0.25  # of LMCache and SimpleCPUOffload
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
FEW = [301, 302, 303]  # with drafts: of all tokens this model repeats no sequence, and no draft is right
COUNTED = {  # lines of the log
    "warned": "does not report where KV is",
    "degraded": "System will operate in degraded mode",
    "waits": "Timeout occurred for rank",
}
FIGURES = {
    "gpu": "vllm:prefix_cache_hits",
    "beyond": "vllm:external_prefix_cache_hits",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def connector(name: str, extra: dict[str, Any], module: str | None = None) -> dict[str, Any]:
    config = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return config | ({"kv_connector_module_path": module} if module else {})


@contextmanager
def options_of(name: str, folder: Path, dram_gib: float = DRAM_GIB) -> Iterator[dict[str, Any]]:
    """A row's options of vllm.LLM, with LMCache's server within. Connectors write to the folder."""
    if name == DRAFTS:
        yield {"speculative_config": NGRAMS}
        return
    if name == OVER_SERVER:
        disk, log = folder / "disk", folder / "lmcache.log"
        with serve_mp(dram_gib, disk, log, module=False, disk_gb=0) as mp:
            yield {"kv_transfer_config": LMCACHES_MP.transfer_config(mp)}
        return
    example = [connector("ExampleConnector", {"shared_storage_path": str(folder / at)}) for at in "abc"]
    dram_bytes = int(dram_gib * 2**30)
    tier = {"lmcache.local_cpu": True, "lmcache.max_local_cpu_size": dram_gib}
    others: Mapping[str, dict[str, Any]] = {
        "ExampleConnector": example[0],
        "MultiConnector": connector(name, {"connectors": example[1:]}),
        "SimpleCPUOffloadConnector": connector(name, {"cpu_bytes_to_use": dram_bytes}),
        SIMPLE: connector(name, {"cpu_bytes_to_use": dram_bytes}, ITS_MODULE),
        "NixlConnector": connector(name, {}) | {"kv_buffer_device": "cpu"},
        IN_PROCESS: connector(name, tier, IN_PROCESS_PATH),
    }
    yield {"kv_transfer_config": others.get(name, connector(name, {}))}


def play(llm: Any, allowed: list[int] | None) -> list[Conversation]:
    """Each prompt three times, the others between: the GPU has lost it, and a connector may have it."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    draw = random.Random(0)
    prompts = [drawn(draw, PROMPT_TOKENS // 2) * 2 for _ in range(PROMPTS)]
    found = []
    for number in range(ROUNDS):
        for program, prompt in enumerate(prompts):
            fields = {"job_id": f"p-{program}", "is_last_step": number == ROUNDS - 1}
            params = SamplingParams(
                temperature=0,
                max_tokens=OUTPUT_TOKENS,
                logprobs=0,
                ignore_eos=True,
                allowed_token_ids=allowed,
                extra_args=fields,
            )
            (answer,) = llm.generate(TokensPrompt(prompt_token_ids=prompt), params, use_tqdm=False)
            conversation = Conversation(list(prompt))
            for token, step in zip(answer.outputs[0].token_ids, answer.outputs[0].logprobs, strict=True):
                conversation.logprobs[len(conversation.tokens)] = step[token].logprob
                conversation.tokens.append(token)
            found.append(conversation)
    return found


def in_this_process(options: dict[str, Any], policy: str, model: Any) -> dict[str, Any]:
    begun_s = time.monotonic()
    os.environ.update(SETTINGS | dict(CPU.env) | {"CONTINUUM_POLICY": "continuum"})
    if config := options.get("kv_transfer_config"):
        from vllm.config import KVTransferConfig

        options = {**options, "kv_transfer_config": KVTransferConfig(**config)}
    llm = engine({**options, "scheduling_policy": policy}, kv_tokens=KV_TOKENS)
    started_s = time.monotonic()
    allowed = FEW if "speculative_config" in options else None
    played = play(llm, allowed)
    ended_s = time.monotonic()
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    pairs = [pair for each in played for pair in judged(each, model, allowed)]
    return {
        "tokens": len(pairs),
        "wrong": sum(off >= EXACT["cpu"] or below >= EXACT["cpu"] for off, below in pairs),
        "start_s": round(started_s - begun_s, 1),
        "seconds": round(ended_s - started_s, 1),
        **{name: int(values[of]) for name, of in FIGURES.items() if of in values},
    }


def child(options: dict[str, Any], policy: str, model: Any, log: Path, answer: Connection) -> None:
    os.setsid()
    with log.open("w") as out:
        for number in (1, 2):
            os.dup2(out.fileno(), number)
    answer.send(in_this_process(options, policy, model))


def measured(options: dict[str, Any], policy: str, model: Any, log: Path) -> dict[str, Any]:
    """In a fork, whose log is read: an engine that fails takes nothing with it."""
    answers, answer = Pipe(duplex=False)
    process = FORKING.Process(target=child, args=(options, policy, model, log, answer))
    process.start()
    answer.close()
    try:
        found = answers.recv()
    except EOFError:
        said = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
        found = {"error": (said or ["it ended without a word"])[-1][-200:]}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    text = log.read_text(errors="replace")
    return {**found, **{what: text.count(line) for what, line in COUNTED.items()}}


def main(names: Annotated[list[str] | None, typer.Argument(help="of rows; else all")] = None) -> None:
    """Exit status 1 if a token is wrong, or an engine fails, beside ours and not on stock."""
    unwind_on_sigterm()
    fork_from_now_on(setattr)
    model, worse = reference(), False
    with TemporaryDirectory() as folder:
        for name in names or NAMES:
            both = {}
            for policy in (STOCK, OURS):
                place = Path(folder, name, policy)
                place.mkdir(parents=True)
                with options_of(name, place) as options:
                    both[policy] = measured(options, policy, model, place / "log")
                print(name, policy, json.dumps(both[policy]), flush=True)
            worse |= both[OURS].get("wrong", 0) > both[STOCK].get("wrong", 0)
            worse |= "error" in both[OURS] and "error" not in both[STOCK]
    raise typer.Exit(worse)


if __name__ == "__main__":
    typer.run(main)
