"""What a client of vllm-router's or agentinfer's sends of its program: their `agentic_context`."""

from __future__ import annotations

import json


def agentic_context(program: str, is_last: bool) -> str:
    """The value of `vllm_xargs.agentic_context`, as JSON text: vLLM lets no mapping through there."""
    return json.dumps(
        {"program_id": program, "task_id": program, "agent_role": "lead", "expected_resume": not is_last}
    )
