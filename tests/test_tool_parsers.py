"""Tool keys from turns that a vLLM parser reads: each parser's own format, through its own class."""

import json
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.tool_parsers import ToolParser, ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from continuum_lmcache.types import NO_CALL, ToolKey
from continuum_lmcache.vllm_plugin.tool_calls import ToolCallReader

RUN = "cd /repo && python -m pytest tests/unit -q"
PYTEST = ("pytest", "bash")
ARGUMENTS = json.dumps({"command": RUN})
CALL = json.dumps({"name": "bash", "arguments": {"command": RUN}})
PARAMETERS = '{"name": "bash", "parameters": ' + ARGUMENTS + "}"
PYTHONIC = f'[bash(command="{RUN}")]'
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"
GLM = f"<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>{RUN}</arg_value>\n</tool_call>"
INVOKE = f'<invoke name="bash">\n<parameter name="command">{RUN}</parameter>\n</invoke>'
COHERE = f"<|START_ACTION|>[{PARAMETERS}]<|END_ACTION|>".replace("name", "tool_name")


def qwen(tag: str) -> str:
    return f"<{tag}>\n<function=bash>\n<parameter=command>\n{RUN}\n</parameter>\n</function>\n</{tag}>"


def dsml(tag: str, space: str = "") -> str:
    mark = f"｜DSML｜{space}"
    given = f'<{mark}parameter name="command" string="true">{RUN}</{mark}parameter>'
    return f'<{mark}{tag}>\n<{mark}invoke name="bash">\n{given}\n</{mark}invoke>\n</{mark}{tag}>'


def minimax(*lines: str) -> str:
    return "\n".join(f"]<]minimax[>[{line}" for line in lines)


def plamo(tag: str, text: str) -> str:
    return f"<|plamo:begin_{tag}:plamo|>{text}<|plamo:end_{tag}:plamo|>"


OWN = {"openai": "whole turns of token ids only", "cohere_command3": "no code", "cohere_command4": "no code"}
"""Parsers of vLLM that read no text; our reader knows their formats."""
NOT_READ = {
    "dots": "takes only names among the request's tools",
    "minicpm5": "takes only names among the request's tools",
    "hf": "needs the checkpoint's response template",
}
SAMPLES = {
    "apertus": f'<|tools_prefix|>[{{"bash": {ARGUMENTS}}}]<|tools_suffix|>',
    "cohere_command3": COHERE,
    "cohere_command4": COHERE,
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n"
    f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>bash<｜tool▁sep｜>"
    f"{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "deepseek_v41": dsml("calls", " "),
    "ernie45": f"{HERMES}\n",
    "functiongemma": f"<start_function_call>call:bash{{command:<escape>{RUN}<escape>}}<end_function_call>",
    "gemma4": f'<|tool_call>call:bash{{command:<|"|>{RUN}<|"|>}}<tool_call|>',
    "gigachat3": f"<|function_call|>{CALL}",
    "glm45": GLM,
    "glm47": GLM.replace("\n", ""),
    "granite": f"<|tool_call|>[{CALL}]",
    "granite-20b-fc": f"<function_call> {CALL}",
    "granite4": f"<tool_call>{CALL}</tool_call>",
    "hermes": HERMES,
    "hunyuan_a13b": f"<tool_calls>[{CALL}]</tool_calls>",
    "hy_v3": f"<tool_calls>{GLM.replace('<arg_key>', '<tool_sep><arg_key>')}</tool_calls>",
    "hy_v4": f"<tool_calls>{GLM}</tool_calls>".replace("\n", ""),
    "inkling": "<|message_model|><|content_invoke_tool_json|>"
    + f"{CALL}<|end_message|>".replace("arguments", "args"),
    "internlm": f"<|action_start|><|plugin|>{PARAMETERS}<|action_end|>",
    "jamba": f"<tool_calls>[{CALL}]</tool_calls>",
    "k2_horizon": "<ifm|tool_calls><ifm|tool_call>bash<ifm|arg_key>command</ifm|arg_key>"
    f"<ifm|arg_value>{RUN}</ifm|arg_value></ifm|tool_call></ifm|tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="bash" index="1"<|sep|><|open|>argument key="command" '
    f'type="string"<|sep|>{RUN}<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "lfm2": f"<|tool_call_start|>{PYTHONIC}<|tool_call_end|>",
    "ling3": GLM,
    "llama3_json": PARAMETERS,
    "llama4_json": f"<|python_tag|>{PARAMETERS}",
    "llama4_pythonic": PYTHONIC,
    "longcat": f"<longcat_tool_call>{CALL}</longcat_tool_call>",
    "mimo": qwen("tool_call").replace("command>\n", "command>").replace("\n</param", "</param"),
    "minimax_m2": f"<minimax:tool_call>\n{INVOKE}\n</minimax:tool_call>",
    "minimax_m3": minimax("<tool_call>", '<invoke name="bash">', f"<command>{RUN}")
    + minimax("</command>", "</invoke>", "</tool_call>"),
    "mistral": f"[TOOL_CALLS]bash[ARGS]{ARGUMENTS}",
    "muse_glimmer": " to=bash<|message|>"
    + f"<function_calls>\n{INVOKE}\n</function_calls><|eom|>".replace("</", "</atem:")
    .replace("<f", "<atem:f")
    .replace("<i", "<atem:i")
    .replace("<p", "<atem:p"),
    "olmo3": f"<function_calls>{PYTHONIC[1:-1]}</function_calls>",
    "openai": f"<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    "phi4_mini_json": f"functools[{CALL}]",
    "plamo3": plamo(
        "tool_requests",
        plamo(
            "tool_request",
            plamo("tool_name", "bash")
            + plamo("tool_arguments", f"<|plamo:constrain|>json<|plamo:msg|>{ARGUMENTS}"),
        ),
    ),
    "poolside_v1": GLM,
    "pythonic": PYTHONIC,
    "qwen3_coder": qwen("tool_call"),
    "qwen3_json": HERMES,
    "qwen3_xml": qwen("tool_call"),
    "seed_oss": qwen("seed:tool_call"),
    "step3": "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
    f'<steptml:invoke name="bash"><steptml:parameter name="command">{RUN}</steptml:parameter>'
    "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
    "step3p5": qwen("tool_call"),
    "xlam": f"[{CALL}]",
}
SPECIAL = re.compile(r"<[^<>\s=]+>|\[[A-Z_]+\]")
END = "<|im_end|>"
LETTERS = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def tokenizer(text: str = "") -> PreTrainedTokenizerFast:
    """One token a byte, and one for each tag of the text, as the format's models have."""
    bytes_only = Tokenizer(models.BPE(LETTERS, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    always = "<|python_tag|>", "<response>", "</response>", END
    bytes_only.add_tokens(sorted({*SPECIAL.findall(text), *always}))
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only)


class Turn(SimpleNamespace):
    """A finished turn of a tokenizer's, which generated this text and then its stop token."""

    def __init__(self, text: str, known: PreTrainedTokenizerFast) -> None:
        stop = known.convert_tokens_to_ids(END)
        params = SimpleNamespace(all_stop_token_ids={stop})
        super().__init__(output_token_ids=[*known.encode(text), stop], sampling_params=params)


def read(text: str, parser: str, offers_tools: bool = True) -> tuple[ToolKey, ...]:
    known, ignored = tokenizer(text), Counter[str]()
    reader = ToolCallReader(known, parser)
    found = reader.read(Turn(text, known), offers_tools, ignored)  # type: ignore[arg-type]
    assert found == reader.read(Turn(text, known), offers_tools, ignored)  # type: ignore[arg-type]
    assert not ignored
    return found


@pytest.mark.parametrize("parser", SAMPLES)
def test_a_call_in_each_parsers_own_format_gives_the_same_key(parser: str) -> None:
    text = SAMPLES[parser]
    assert read(text, parser) == (PYTEST,)
    assert read("I think.</think>\n" + text, parser) == (PYTEST,)
    source = ToolCallReader(tokenizer(text), parser).source
    assert source == f"vLLM's parser {parser}" or (parser in OWN and "cannot be used" in source)


def test_every_parser_of_this_vllm_is_read_or_known_not_to_be() -> None:
    known = {*SAMPLES, *NOT_READ}
    assert [name for name in ToolParserManager.list_registered() if name not in known] == []


@pytest.mark.parametrize("parser", ["mistral", "qwen3_coder", "kimi_k2", "deepseek_v4"])
def test_a_long_argument_is_read_whole_and_not_a_part_at_a_time(parser: str) -> None:
    """vLLM's parser engine converts all arguments so far for each part that a stream would send."""
    text = SAMPLES[parser].replace(RUN, "make " + "words of a file " * 50)
    known = tokenizer(text)
    reader, parts = ToolCallReader(known, parser), []
    engine = reader._parser._parser_engine  # type: ignore[union-attr]
    stock = engine._handle_arg_chunk
    engine._handle_arg_chunk = lambda event, deltas: (parts.append(event), stock(event, deltas))
    reader._tokenizer = SimpleNamespace(decode=lambda *_, **__: text)  # a token of one byte is too short
    assert reader.read(Turn(text, known), True, Counter()) == (("make", "bash"),)  # type: ignore[arg-type]
    assert len(parts) < 20


@pytest.mark.parametrize("parser", ["", "hermes"])
def test_a_request_without_tools_is_not_read_by_the_parser_as_its_client_gets_no_calls(parser: str) -> None:
    text = "```bash\nmake\n```"
    assert read(text, parser, offers_tools=False) == (("make", "bash"),)
    assert read(text, parser, offers_tools=True) == ()
    assert read(PYTHONIC, "pythonic", offers_tools=False) == ()


def test_parallel_calls_answers_and_what_may_be_a_call() -> None:
    assert read('[read(path="a"), bash(command="tox")]', "pythonic") == (("read",), ("tox", "bash"))
    assert read("The tests pass.", "hermes") == (NO_CALL,)
    assert read('of a long file"}}\n</tool_call>', "hermes") == ()


def test_a_forced_call_is_json_whatever_the_parser() -> None:
    """vLLM has a model write JSON where tool_choice is "required"."""
    assert read(f"[{PARAMETERS}]", "hermes") == (PYTEST,)


class PanicException(BaseException):
    """As code in Rust raises it."""


@pytest.mark.parametrize("error", [ValueError, RecursionError, PanicException])
def test_no_error_of_a_parser_ends_an_engine(error: type[BaseException], monkeypatch: Any) -> None:
    known, ignored = tokenizer(), Counter[str]()
    reader = ToolCallReader(known, "hermes")

    def extract_tool_calls(*_: Any) -> None:
        raise error("a text it cannot take")

    monkeypatch.setattr(reader._parser, "extract_tool_calls", extract_tool_calls)
    assert reader.read(Turn("The tests pass.", known), True, ignored) == (NO_CALL,)  # type: ignore[arg-type]
    assert ignored == {"output_token_ids": 1}


def test_a_parser_that_cannot_be_built_is_named_with_the_reason_and_ours_reads() -> None:
    reader = ToolCallReader(tokenizer(), "hy_v3")
    assert "vLLM's parser hy_v3 cannot be used: RuntimeError(" in reader.source
    assert "not found" in ToolCallReader(tokenizer(), "a-typo").source
    assert "no --tool-call-parser" in ToolCallReader(tokenizer()).source


def test_a_users_own_parser_is_read_from_its_file(tmp_path: Any) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser\n"
        "from vllm.tool_parsers import ToolParserManager\n"
        "ToolParserManager.register_module('mine', module=Hermes2ProToolParser)\n"
    )
    reader = ToolCallReader(tokenizer(), "mine", str(plugin))
    assert reader.source == "vLLM's parser mine" and isinstance(reader._parser, ToolParser)
    ToolParserManager.tool_parsers.pop("mine")


def test_the_engines_config_names_the_servers_parser(model: Any) -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    given = ["--model", str(model), "--dtype", "bfloat16", "--scheduling-policy", "continuum"]
    for more, name in ([], ""), (["--enable-auto-tool-choice", "--tool-call-parser", "hermes"], "hermes"):
        config = AsyncEngineArgs.from_cli_args(parser.parse_args([*given, *more])).create_engine_config()
        assert vars(config.scheduler_config)["tool_call_parser"] == name
