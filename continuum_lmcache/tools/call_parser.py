"""Finds what a finished turn called: from its text to tool keys, in the formats that models write.

A key is hierarchical, most specific first: ("pytest", "bash"). Any text of any
size is safe: only the tail is read, in one pass a format, and what cannot be parsed is no call.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from continuum_lmcache.tools.shell_key import command_key, levels, weight
from continuum_lmcache.types import ToolKey

TAIL_TOKENS = 512  # how many output tokens a caller decodes, special tokens included
MAX_CHARS = 32_768  # of text; a token is rarely longer than 64 characters
MAX_END_CHARS = 256  # stop tokens are looked for there: a search from each of them is quadratic
MAX_CALLS = 16
MAX_JSON_TRIES = 32  # opening braces that may turn out to be no JSON
MAX_DEPTH = 3  # a message, its call, the function of it; deeper could exhaust Python's stack
MAX_COMMAND_WORDS = 64

THOUGHTS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"))
FENCE = re.compile(r"^[ \t]*```(?:bash|sh|shell|zsh|console|mswea_bash_command)[ \t]*\n", re.MULTILINE)
NAME = re.compile(r"\s*([\w.-]+)")
STOP_TOKENS = re.compile(r"(?:\s|<[^<>/\s]{1,32}>|</s>)+\Z")  # <|im_end|>, <end_of_turn>
DECODER = json.JSONDecoder(strict=False)  # models leave line breaks inside strings
COMMAND_ARGUMENTS = ("command", "cmd", "keystrokes")
SHELL_TOOL = re.compile(r"sh|term|cmd|command|console", re.IGNORECASE)


def tool_calls(text: str, offers_tools: bool = False) -> tuple[ToolKey, ...]:
    """Every call that the finished turn's text ends with, in its order; () if there is none.

    For texts that no parser of vLLM's reads (vllm_plugin/tool_calls.py). Formats, the first that finds a call
    wins: bare `<function=...>` (OpenHands), gpt-oss `to=functions.`, the last ```bash block as mini-swe-agent
    has it, JSON (OpenAI `tool_calls`, Cohere, Hermes, Llama 3 `parameters`, Terminal-Bench `commands`). An
    unclosed block counts: a stop string may have swallowed its end. Thoughts are not read.

    `offers_tools`: the request did, so a ```bash block is part of an answer or of a file.
    """
    tail = without_thinking(text[-MAX_CHARS:])
    for read in FORMATS:
        if offers_tools and read is bash_block_calls:
            continue
        if calls := tuple(islice(read(tail), MAX_CALLS)):
            return calls
    return ()


def likely_slowest(calls: Iterable[ToolKey]) -> ToolKey:
    """Of parallel calls, the first of the program known to be slow, as in a compound command; () of none.

    With learned gaps at hand, `ToolDurations.slowest` knows better.
    """
    return max(calls, key=lambda key: weight(key[-2:][0]), default=())


def is_answer(text: str) -> bool:
    """Whether a text without a call is one to its user. One that ends as a call does may be a call that is
    longer than the text, or in a format that is not known.
    """
    answer = STOP_TOKENS.sub("", without_thinking(text[-MAX_CHARS:])[-MAX_END_CHARS:])
    return bool(answer) and not answer.endswith(("}", "]", ")", ">", "`"))


def without_thinking(text: str) -> str:
    """The text after the last thought that is closed, and before the first that is not."""
    for opening, closing in THOUGHTS:
        text = text.rpartition(closing)[2].partition(opening)[0]
    return text


def function_tag_calls(text: str) -> Iterator[ToolKey]:
    """<function=name><parameter=key>value</parameter></function>, or JSON in the place of parameters."""
    if 0 <= text.find("{") < text.find("<function=") and any(json_calls(text)):
        return  # the tag is text in a call's argument
    for block in text.split("<function=")[1:]:
        name, _, body = block.partition(">")
        pairs = [p.partition(">") for p in body.split("<parameter=")[1:]]
        given = {key: value.partition("</parameter>")[0] for key, _, value in pairs}
        yield from call(name.strip(" \"'"), given or body.partition("</function>")[0])


def harmony_calls(text: str) -> Iterator[ToolKey]:
    """to=functions.name ...{...}: gpt-oss, whose parser in vLLM reads whole turns of token ids only."""
    for block in text.split(" to=functions.")[1:]:
        if name := NAME.match(block):
            yield from call(name[1], block[max(block.find("{"), 0) :])


def bash_block_calls(text: str) -> Iterator[ToolKey]:
    """The last ```bash block."""
    starts = [found.end() for found in FENCE.finditer(text)] if "```" in text else []
    if starts:
        end = text.find("\n```", starts[-1] - 1)
        yield command_key(text[starts[-1] : end if end >= 0 else len(text)], "bash")


def json_calls(text: str) -> Iterator[ToolKey]:
    """The calls in every JSON object of the text."""
    at = -1
    for _ in range(MAX_JSON_TRIES):
        at = text.find("{", max(at, 0))
        if at < 0:
            return
        try:
            value, at = DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
        else:
            yield from calls_in(value)


def calls_in(value: dict[str, Any], depth: int = MAX_DEPTH) -> Iterator[ToolKey]:
    """The calls of one JSON object: one call, a message with `tool_calls`, or a batch of `commands`."""
    nested: list[Any] = [value.get("function"), value.get("function_call")]
    for key in ("tool_calls", "commands"):
        listed = value.get(key)
        nested += listed if isinstance(listed, list) else []
    for item in nested:
        if isinstance(item, dict) and depth:
            yield from calls_in(item, depth - 1)
    if isinstance(value.get("keystrokes"), str):
        yield command_key(value["keystrokes"], "terminal")
    for key in ("arguments", "parameters", "input"):
        if key in value:
            yield from call(value.get("name", value.get("tool_name")), value[key])
            return


def call(name: Any, given: Any) -> Iterator[ToolKey]:
    """The key of one call: a shell's by its command, else by the tool's name."""
    if not isinstance(name, str) or not levels(name):
        return
    arguments = loaded(given) if isinstance(given, str) else given
    if not isinstance(arguments, dict):
        arguments = {}
    command = next((arguments[key] for key in COMMAND_ARGUMENTS if key in arguments), None)
    if command is None and SHELL_TOOL.search(name):
        command = arguments.get("code")
    if isinstance(command, list):
        command = shlex.join(word for word in command[:MAX_COMMAND_WORDS] if isinstance(word, str))
    if isinstance(command, str):
        yield command_key(command, name)
    else:
        yield levels(name)


def loaded(text: str) -> Any:
    """Arguments as the JSON they should be; {} where they are not."""
    try:
        return DECODER.raw_decode(text, max(text.find("{"), 0))[0]
    except (ValueError, RecursionError):
        return {}


FORMATS = (function_tag_calls, harmony_calls, bash_block_calls, json_calls)
