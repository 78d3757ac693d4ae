"""The fields by which clients of vllm-router and agentinfer name their program: `agentic_context`."""

from __future__ import annotations

import json


def agentic_context(program: str, is_last: bool) -> str:
    """The value of `vllm_xargs.agentic_context`, as JSON text: vLLM lets no mapping through there."""
    return json.dumps(
        {"program_id": program, "task_id": program, "agent_role": "lead", "expected_resume": not is_last}
    )
