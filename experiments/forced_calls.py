"""Makes a model say a trace's tool calls: their text in the formats models write.

The text is what a model of that kind would have said; what is under test is that the server reads
the call back out of it. A program keeps one format from its first turn to its last, as agents do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from continuum_lmcache.commands import command_key
from continuum_lmcache.recorder import digest, without_argument
from continuum_lmcache.types import ToolKey
from experiments.workload import Program

COMMAND_CHARS = 64  # of a command or argument: longer ones only make the small model speak longer
SHELL = "bash"  # the trace's Bash, by the name that mini-swe-agent and most others give it
ARGUMENTS = {  # what the trace's `command` is to a tool that is no shell
    **dict.fromkeys(("Read", "Edit", "Write"), "file_path"),
    **dict.fromkeys(("Grep", "Glob"), "pattern"),
    "WebFetch": "url",
    "WebSearch": "query",
    "Task": "description",
}


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of a trace."""

    tool: str
    command: str  # the shell's command, or another tool's main argument; "" where the trace has none
    gap_s: float  # how long the tool took
    result_tokens: int  # by how much its result makes the next prompt longer


@dataclass(frozen=True, slots=True)
class Script:
    """What one program will say, turn by turn, and in which format. After its calls it says goodbye."""

    program: str
    form: str
    calls: tuple[Call, ...]


def script(program: Program, form: str, most_calls: int) -> Script:
    """The program's first calls whose tool and gap the trace knows."""
    known = [
        Call(SHELL if t.tool == "Bash" else t.tool, t.command[:COMMAND_CHARS], t.gap_s, following.new_tokens)
        for t, following in zip(program.turns, program.turns[1:], strict=False)
        if t.tool and t.gap_s is not None
    ]
    return Script(program.program_id, form, tuple(known[:most_calls]))


def text(call: Call, form: str) -> str:
    """What the model says to make this call. Block programs make calls that are no command in JSON."""
    if form == "block" and call.tool == SHELL:
        return f"```mswea_bash_command\n{call.command}\n```"
    return JSON_FORMS.get(form, hermes)(call)


def arguments(call: Call) -> dict[str, str]:
    name = "command" if call.tool == SHELL else ARGUMENTS.get(call.tool, "input")
    return {name: call.command} if call.command else {}


def hermes(call: Call) -> str:
    said = json.dumps({"name": call.tool, "arguments": arguments(call)})
    return f"<tool_call>\n{said}\n</tool_call>"


def openai(call: Call) -> str:
    """Arguments are JSON within JSON, as the API has them."""
    function = {"name": call.tool, "arguments": json.dumps(arguments(call))}
    return json.dumps({"tool_calls": [{"type": "function", "function": function}]})


JSON_FORMS: dict[str, Callable[[Call], str]] = {"hermes": hermes, "openai": openai}
FORMS = ("block", *JSON_FORMS)


def forced(said: str) -> dict[str, Any]:
    """Request fields that let a model say exactly this and nothing else (vLLM: structured outputs)."""
    return {
        "structured_outputs": {"choice": [said]},
        "max_tokens": len(said.encode()) + 8,  # a token is a byte at least
        "ignore_eos": False,  # the end of the text is the turn's
    }


def recognised(call: Call, key: ToolKey) -> bool:
    """Is this the call's key, as parsed or as recorded? A shell's is its whole command's, another
    tool's ends with its name.
    """
    if call.tool == SHELL:
        parsed = command_key(call.command, SHELL)
        return key in (parsed, without_argument(parsed, digest))
    return key[-1:] == (call.tool,)


def known(call: Call) -> bool:
    """Whether the trace says what was called with."""
    return bool(call.command)
