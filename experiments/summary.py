"""The results of a replay, as one JSON object. Schema 1:

    schema            1
    label, seed, jps, time_scale, workload, model, programs
                      the settings; jps null: the trace's own arrivals
    turns, errors, finished       turns answered, turns failed, programs run to their end
    wall_s            start to the last answer
    job_time_s        a finished program's arrival to its last answer: n, mean, p50, p95, p99, max
    ttft_s            a turn's arrival to its first token, the same figures; turn_s: to its last one
    first_ttft_s      ttft_s of the programs' first turns only, where admission would show; later_ttft_s:
                      of all other turns
    late_s            how late this client sent turns: the same figures; it must be small beside ttft_s
    jobs_per_s, output_tokens_per_s, prompt_tokens, output_tokens
    tokens_by_source  prompt tokens by where their KV came from: gpu, dram, ssd, computed; offload in
                      place of dram and ssd where the server does not say which; absent without metrics
    pins              pins by outcome, as the server names them: taken, reused, expired, reclaimed, ...
    job_times_s       the sorted job times, for distributions
    cut_s             where the replay had a time limit: for how long each program that it cut off had run
    new_tokens        prompt tokens that no earlier turn of their program had: nothing could be reused
    server            metrics of the server: counters as the difference over the replay, gauges as found
                      at its end; named as in /metrics, with the labels that tell series apart

The figures of an empty set are {"n": 0}. Percentiles interpolate linearly between observations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from experiments.driver import TurnRecord

SCHEMA = 1
VLLM_METRICS = frozenset(
    f"vllm:{name}"
    for name in (
        "prefix_cache_queries",
        "prefix_cache_hits",
        "external_prefix_cache_queries",
        "external_prefix_cache_hits",
        "num_preemptions",
        "prompt_tokens_by_source",
        "kv_cache_usage_perc",
    )
)
OURS = "continuum"
SAME_FOR_ALL = ("model_name", "engine")  # labels that tell nothing apart on one server
NOT_COUNTS = ("_bucket", "_created")
Metrics = dict[str, float]


def scraped(text: str) -> tuple[Metrics, frozenset[str]]:
    """The metrics of interest in a /metrics page by name and labels, and which of them are gauges."""
    found: Metrics = {}
    gauges = set()
    for family in text_string_to_metric_families(text):
        if family.name not in VLLM_METRICS and not family.name.startswith(OURS):
            continue
        for sample in family.samples:
            if sample.name.endswith(NOT_COUNTS):
                continue
            labels = {k: v for k, v in sample.labels.items() if k not in SAME_FOR_ALL}
            key = series(sample.name, **labels)
            found[key] = found.get(key, 0.0) + sample.value
            if family.type == "gauge":
                gauges.add(key)
    return found, frozenset(gauges)


def series(name: str, **labels: str) -> str:
    """A series' name as in /metrics: `name{label="value"}`."""
    inside = ",".join(f'{k}="{v}"' for k, v in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name


def over_the_run(before: str, after: str) -> Metrics:
    """Two /metrics pages: counters as differences, gauges as they are in the second."""
    first, _ = scraped(before)
    last, gauges = scraped(after)
    return {k: v if k in gauges else v - first.get(k, 0.0) for k, v in last.items()}


def tokens_by_source(server: Metrics, prompt_tokens: int) -> dict[str, int]:
    """Prompt tokens by the source of their KV; {} if the server's metrics do not have it."""
    if "vllm:prefix_cache_hits_total" not in server:
        return {}
    found = {"gpu": server["vllm:prefix_cache_hits_total"]}
    loaded = {t: server.get(series("continuum_prompt_tokens_total", tier=t)) for t in ("dram", "ssd")}
    if any(tokens is not None for tokens in loaded.values()):
        found |= {tier: tokens or 0.0 for tier, tokens in loaded.items()}
    else:
        found["offload"] = server.get("vllm:external_prefix_cache_hits_total", 0.0)
    found["computed"] = prompt_tokens - sum(found.values())
    return {source: round(tokens) for source, tokens in found.items()}


def pins(server: Metrics) -> dict[str, int]:
    """Pins by outcome; {} on a server without pins."""
    prefix, suffix = 'continuum_pins_total{outcome="', '"}'
    return {k[len(prefix) : -len(suffix)]: round(v) for k, v in server.items() if k.startswith(prefix)}


def figures(values: Iterable[float]) -> dict[str, float]:
    """n, mean, p50, p95, p99 and max."""
    seen = np.fromiter(values, float)
    if not len(seen):
        return {"n": 0}
    p50, p95, p99, most = map(float, np.percentile(seen, (50, 95, 99, 100)))
    return {"n": len(seen), "mean": float(seen.mean()), "p50": p50, "p95": p95, "p99": p99, "max": most}


def summarise(records: Sequence[TurnRecord], server: Metrics, how: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of schema 1. `how` holds label, seed, jps, time_scale, workload, model, programs."""
    good = [(r, r.t_first, r.t_done) for r in records if r.t_first is not None and r.t_done is not None]
    arrivals = {r.program: r.t_arrive for r, _, _ in good if r.turn == 1}
    jobs = sorted(done - arrivals[r.program] for r, _, done in good if r.turn == r.of_turns)
    wall_s = max((done for _, _, done in good), default=0.0)
    prompt_tokens = sum(r.prompt_tokens for r, _, _ in good)
    output_tokens = sum(r.output_tokens for r, _, _ in good)
    return {
        "schema": SCHEMA,
        **how,
        "turns": len(good),
        "errors": len(records) - len(good),
        "finished": len(jobs),
        "wall_s": wall_s,
        "job_time_s": figures(jobs),
        "ttft_s": figures(first - r.t_arrive for r, first, _ in good),
        "first_ttft_s": figures(first - r.t_arrive for r, first, _ in good if r.turn == 1),
        "later_ttft_s": figures(first - r.t_arrive for r, first, _ in good if r.turn > 1),
        "turn_s": figures(done - r.t_arrive for r, _, done in good),
        "late_s": figures(r.t_sent - r.t_arrive for r in records),
        "jobs_per_s": len(jobs) / wall_s if wall_s else 0.0,
        "output_tokens_per_s": output_tokens / wall_s if wall_s else 0.0,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "tokens_by_source": tokens_by_source(server, prompt_tokens),
        "pins": pins(server),
        "job_times_s": jobs,
        "server": server,
    }
