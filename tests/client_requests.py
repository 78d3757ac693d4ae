"""Requests as known agents send them, by their public documentation and sources.

docs/clients.md names the versions. The texts are ours and short; the tests are about the fields in which each
client puts its names, and the other fields that it sends.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

PARENT, CHILD = "parent", "child"
SECRET = "Bearer sk-not-for-the-engine"
READ = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
HISTORY = {
    PARENT: [
        "You are a coding agent. " * 4,
        "Mend the failing test.",
        "I look at the folder.",
        "a.py test_a.py",
        "I ask a helper to look at a.py.",
        "It is line 4.",
    ],
    CHILD: ["You are a helper that searches. " * 4, "Find the failing line.", "I read the file.", "a = b"],
}
ORDER = ((PARENT, 1), (PARENT, 2), (CHILD, 1), (CHILD, 2), (PARENT, 3))


@dataclass(frozen=True)
class Turn:
    """One request of one agent."""

    agent: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass(frozen=True)
class Client:
    """A session: turns of a parent, of its subagent, and the parent's next turn."""

    turns: tuple[Turn, ...]
    hints: bool = False  # its names are shared by several programs


def session(make: Callable[[str, int], Turn], hints: bool = False) -> Client:
    return Client(tuple(make(agent, turn) for agent, turn in ORDER), hints)


def chat(agent: str, turn: int) -> list[dict[str, Any]]:
    """System and user messages; for a later turn also the answers and tool results."""
    roles = ("system", "user", *("assistant", "user") * (turn - 1))
    return [{"role": role, "content": text} for role, text in zip(roles, HISTORY[agent], strict=False)]


CLAUDE = "6f0c2f0a-58a1-4b2e-9d55-0f2f6a7a1c11"
CLAUDE_HEADERS = {
    "anthropic-beta": "interleaved-thinking-2025-05-14",
    "anthropic-version": "2023-06-01",
    "authorization": SECRET,
    "user-agent": "claude-cli/2.1.268 (external, cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
}


def claude_code(agent: str, turn: int) -> Turn:
    """Subagents share the session's id; only they have an agent's id. `cch` is new in each request."""
    nonce = f"{7919 * len(agent) + 104729 * turn:05x}"
    billing = f"x-anthropic-billing-header: cc_version=2.1.268.a1b; cc_entrypoint=cli; cch={nonce};"
    names = {"x-claude-code-session-id": CLAUDE}
    if agent == CHILD:
        names |= {"x-claude-code-agent-id": "a4b1f27c", "x-claude-code-parent-agent-id": "main"}
    system, *messages = chat(agent, turn)
    user = json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": CLAUDE})
    body = {
        "model": "m",
        "max_tokens": 32000,
        "system": [{"type": "text", "text": text} for text in (billing, system["content"])],
        "messages": [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages],
        "tools": [{"name": "Read", "description": "Reads a file.", "input_schema": READ}],
        "metadata": {"user_id": user},
        "stream": True,
    }
    return Turn(agent, "/v1/messages", CLAUDE_HEADERS | names, body)


def claude_code_without_headers(agent: str, turn: int) -> Turn:
    """Behind a proxy that passes on the body only."""
    full = claude_code(agent, turn)
    return Turn(agent, full.path, {"authorization": SECRET}, full.body)


def older_claude_code(agent: str, turn: int) -> Turn:
    """Before 2.1.78."""
    full = claude_code_without_headers(agent, turn)
    user = f"user_{'d' * 64}_account__session_{CLAUDE}"
    return Turn(agent, full.path, full.headers, full.body | {"metadata": {"user_id": user}})


CODEX = {PARENT: "019ee74f-22b5-7043-b5fc-697ca0fbd5a6", CHILD: "019ee750-1c0e-7d12-8f00-4b8c1f2a9d77"}


def codex(agent: str, turn: int, thread: str = "thread-id", root: str = "session-id") -> Turn:
    """A subagent is a separate thread in the session of its root; the cache key is the root's."""
    names = {root: CODEX[PARENT], thread: CODEX[agent]}
    headers = {"authorization": SECRET, "originator": "codex_cli_rs", "user-agent": "codex_cli_rs/0.144.4"}
    headers["x-codex-turn-metadata"] = json.dumps({"request_kind": "turn", "turn_id": str(turn)})
    if agent == CHILD:
        headers["x-codex-parent-thread-id"] = CODEX[PARENT]
    system, *messages = chat(agent, turn)
    body = {
        "model": "m",
        "instructions": system["content"],
        "input": [item(number, **message) for number, message in enumerate(messages)],
        "tools": [{"type": "function", "name": "shell", "parameters": READ, "strict": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "store": False,
        "stream": True,
        "prompt_cache_key": CODEX[PARENT],
    }
    return Turn(agent, "/v1/responses", headers | names, body)


def item(number: int, role: str, content: str) -> dict[str, Any]:
    """A message as the Responses API has it."""
    if role == "user":
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": content}]}
    text = {"type": "output_text", "text": content, "annotations": []}
    return {"type": "message", "id": f"msg_{number}", "status": "completed", "role": role, "content": [text]}


OPENCODE = {PARENT: "ses_0f3a9c1d2b4eAbCdEfGhIjKlMn", CHILD: "ses_0f3a9c77aa01NoPqRsTuVwXyZa"}


def opencode(agent: str, turn: int, names: tuple[str, ...] = ("x-session-affinity", "X-Session-Id")) -> Turn:
    """A subtask is a separate session that names its parent's."""
    headers = {"authorization": SECRET, "user-agent": "opencode/1.18.31"}
    headers |= dict.fromkeys(names, OPENCODE[agent])
    if agent == CHILD:
        headers["x-parent-session-id"] = OPENCODE[PARENT]
    tools = [{"type": "function", "function": {"name": "read", "parameters": READ}}]
    body = {"model": "m", "messages": chat(agent, turn), "tools": tools, "stream": True, "max_tokens": 32000}
    return Turn(agent, "/v1/chat/completions", headers, body)


def completion(agent: str, turn: int, headers: dict[str, str], **fields: Any) -> Turn:
    body = {"model": "m", "messages": chat(agent, turn), **fields}
    return Turn(agent, "/v1/chat/completions", {"authorization": SECRET, **headers}, body)


def dynamo(agent: str, turn: int) -> Turn:
    """A harness plugin of Dynamo's: the canonical headers, the last request of a session marked."""
    names = {"x-dynamo-session-id": f"run-42:{agent}", "x-dynamo-parent-session-id": "run-42"}
    last = {"x-dynamo-session-final": "true"} if (agent, turn) == (CHILD, 2) else {}
    return completion(agent, turn, names | last)


def agentic_context(agent: str, turn: int, of_session: bool = False) -> Turn:
    """A client of vllm-router or agentinfer; some name a session and the agent within it, and no program."""
    names = {"program_id": f"task-7:{agent}", "task_id": "task-7", "agent_role": agent}
    if of_session:
        names = {"session_id": "session-7", "agent_id": agent}
    context = json.dumps({**names, "expected_resume": (agent, turn) != (CHILD, 2)})
    return completion(agent, turn, {}, vllm_xargs={"agentic_context": context})


def agent_hint(agent: str, turn: int, in_xargs: bool = False) -> Turn:
    """agentinfer's other form. In `vllm_xargs` it is JSON text: vLLM lets no mapping through there."""
    last = (agent, turn) == (CHILD, 2)
    hint = {"session_id": f"s-{agent}", "blocks_parent": False, "expected_resume": not last}
    fields = {"vllm_xargs": {"agent_hint": json.dumps(hint)}} if in_xargs else {"agent_hint": hint}
    return completion(agent, turn, {}, **fields)


def cache_key(agent: str, turn: int) -> Turn:
    """The OpenAI Agents SDK, pi, kimi-cli and others: one key for a conversation and its subagents."""
    return completion(agent, turn, {}, prompt_cache_key="conversation-9")


def harbor(agent: str, turn: int) -> Turn:
    """mini-swe-agent under Harbor: a session a trial."""
    return completion(agent, turn, {"X-Session-ID": f"trial-{agent}"})


def thunderagent(agent: str, turn: int) -> Turn:
    """ThunderAgent's clients and its ports: a rollout."""
    return completion(agent, turn, {}, program_id=f"rollout-{agent}")


def agentx(agent: str, turn: int) -> Turn:
    """AgentX's harness: a session's, beside a new one for each request."""
    return completion(agent, turn, {"X-Correlation-ID": f"c-{agent}", "X-Request-ID": f"r-{agent}-{turn}"})


def conversation(agent: str, turn: int, by_id: bool = False) -> Turn:
    """A client of the Responses API that keeps its conversations itself."""
    system, *messages = chat(agent, turn)
    said = [item(number, **message) for number, message in enumerate(messages)]
    body = {"model": "m", "instructions": system["content"], "input": said}
    body["conversation"] = f"conv_{agent}" if by_id else {"id": f"conv_{agent}"}
    return Turn(agent, "/v1/responses", {"authorization": SECRET}, body)


CLIENTS: dict[str, Client] = {
    "Claude Code": session(claude_code),
    "Claude Code, headers stripped": session(claude_code_without_headers, hints=True),
    "Claude Code before 2.1.78": session(older_claude_code, hints=True),
    "Codex": session(codex),
    "Codex up to 0.130": session(partial(codex, thread="thread_id", root="session_id")),
    "OpenCode": session(opencode),
    "OpenCode before 1.17": session(partial(opencode, names=("x-session-affinity",))),
    "Dynamo's plugins": session(dynamo),
    "agentic_context": session(agentic_context),
    "agentic_context of a session's agents": session(partial(agentic_context, of_session=True)),
    "agent_hint": session(agent_hint),
    "agent_hint in vllm_xargs": session(partial(agent_hint, in_xargs=True)),
    "prompt_cache_key": session(cache_key, hints=True),
    "Harbor": session(harbor),
    "ThunderAgent": session(thunderagent),
    "AgentX": session(agentx, hints=True),
    "conversation": session(conversation),
    "conversation by its id": session(partial(conversation, by_id=True)),
}
ENDS = {  # say which request is a program's last
    *("Dynamo's plugins", "agentic_context", "agentic_context of a session's agents"),
    *("agent_hint", "agent_hint in vllm_xargs"),
}
