"""The peers' settings for a machine, from the profile that our policy reads, and their requests' fields."""

from __future__ import annotations

import json
from typing import Any

from experiments.sim.step_time import Machine

# The router keeps no TTL and reserves no growth before its window of requests is full. At its default of 100
# a quarter of a run of 430 has passed by then: a smaller one stands for a server that has run for some time.
WARM_WINDOW = 30


def prefill(machine: Machine) -> tuple[float, float, float]:
    """Seconds of a cold prefill: fixed, for each 1,000 tokens, for each square of 1,000 tokens."""
    curve = machine.costs.prefill
    return curve.fixed_s, 1e3 * curve.per_token_s, 1e6 * curve.per_pair_s / 2


def decode(machine: Machine) -> tuple[float, float, float]:
    """Seconds of a step that only decodes: fixed, for each request, for each token of context."""
    step = machine.step
    two_s, one_s = (step.seconds([(1, 0)] * n) for n in (2, 1))
    return 2 * one_s - two_s, two_s - one_s, step.per_cached_token_s


def router(machine: Machine, capacity_tokens: int, window: int | None) -> dict[str, Any]:
    """--program-scheduling-config-json: the example of its documentation with this machine's coefficients.

    `window` is `stats_window_size`; None: its default.
    """
    fixed_s, linear_s, quadratic_s = prefill(machine)
    step_s, request_s, token_s = decode(machine)
    config: dict[str, Any] = {
        "program_scheduling_enable_key": "vllm_xargs.agentic_context",
        "global_queue": True,
        "resume_order": "mru",
        "token_capacity_per_dp_rank": capacity_tokens,
        "metrics_interval_seconds": 1.0,
        "prefill_cost_model": {
            "intercept_seconds": fixed_s,
            "linear_seconds_per_1k_tokens": linear_s,
            "quadratic_seconds_per_1k_tokens_squared": quadratic_s,
            "decode_throughput_alpha": 0.15,
        },
        "decode_throughput_model": {
            "fixed_step_seconds": step_s,
            "batch_step_seconds_per_request": request_s,
            "context_step_seconds_per_token": token_s,
        },
    }
    return config | ({} if window is None else {"stats_window_size": window})


def agentinfer(machine: Machine) -> dict[str, Any]:
    """`additional_config.agentcache`: its defaults with this machine's coefficients."""
    fixed_s, linear_s, quadratic_s = prefill(machine)
    step_s, request_s, token_s = decode(machine)
    return {
        "progress_ttl": {
            "mode": "on",
            "ttl_prefill_model_intercept_seconds": fixed_s,
            "ttl_prefill_model_linear_seconds_per_1k_tokens": linear_s,
            "ttl_prefill_model_quadratic_seconds_per_1k_tokens_squared": quadratic_s,
            "decode_step_fixed_seconds": step_s,
            "decode_step_seconds_per_request": request_s,
            "decode_step_seconds_per_context_token": token_s,
        }
    }


def agentic_context(program: str, is_last: bool) -> str:
    """The fields by which clients of vllm-router and agentinfer name their program.

    The value of `vllm_xargs.agentic_context`, as JSON text: vLLM lets no mapping through there.
    """
    return json.dumps(
        {"program_id": program, "task_id": program, "agent_role": "lead", "expected_resume": not is_last}
    )
