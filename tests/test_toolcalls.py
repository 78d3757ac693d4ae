"""Tool keys from a model's text."""

import gc
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum_lmcache.tools.call_parser import MAX_CALLS, MAX_CHARS, is_answer, likely_slowest, tool_calls
from continuum_lmcache.tools.shell_key import MAX_KEY_CHARS, command_key, levels
from continuum_lmcache.types import ToolKey

FENCE = "```"


def tool_key(text: str, offers_tools: bool = False) -> ToolKey:
    return likely_slowest(tool_calls(text, offers_tools))


PYTEST = ("pytest", "bash")
RUN = "cd /repo && python -m pytest tests/unit -q"


def as_json(**value: object) -> str:
    return json.dumps(value)


FORMATS = {
    "mini-swe-agent": f"THOUGHT: run them\n\n{FENCE}bash\n{RUN}\n{FENCE}",
    "mini-swe-agent 2": f"{FENCE}mswea_bash_command\n{RUN}\n{FENCE}\n",
    "sh": f"{FENCE}sh\n{RUN}\n{FENCE}",
    "shell, its end taken by a stop string": f"{FENCE}shell\n{RUN}\n",
    "OpenAI message": as_json(
        role="assistant",
        tool_calls=[{"type": "function", "function": {"name": "bash", "arguments": as_json(command=RUN)}}],
    ),
    "OpenAI list": json.dumps([{"function": {"name": "bash", "arguments": as_json(cmd=RUN)}}]),
    "Anthropic block": as_json(type="tool_use", name="bash", input={"command": RUN}),
    "Hermes": f"<tool_call>\n{as_json(name='bash', arguments={'command': RUN})}\n</tool_call>",
    "Hermes, unclosed": f"<tool_call>\n{as_json(name='bash', arguments={'command': RUN})}",
    "Qwen XML": f"<tool_call>\n<function=bash>\n<parameter=command>\n{RUN}\n</parameter>\n</function>\n"
    "</tool_call>",
    "bare XML": f"<function=bash><parameter=command>{RUN}</parameter></function>",
    "Llama 3.1 function": f"<function=bash>{as_json(command=RUN)}</function>",
    "Llama 3 JSON": f"<|python_tag|>{as_json(name='bash', parameters={'command': RUN})}",
    "Mistral": f"[TOOL_CALLS]{json.dumps([{'name': 'bash', 'arguments': {'command': RUN}}])}",
    "gpt-oss": "<|channel|>commentary to=functions.bash <|constrain|>json<|message|>"
    + as_json(command=RUN)
    + "<|call|>",
    "Codex": as_json(name="bash", arguments=as_json(command=["bash", "-lc", RUN])),
}


@pytest.mark.parametrize("text", FORMATS.values(), ids=FORMATS)
def test_every_format_gives_the_same_call_the_same_key(text):
    assert tool_calls(f"I shall run the tests.\n{text}") == (PYTEST,)
    assert tool_key(text) == PYTEST


def test_terminal_bench_commands_are_keyed_by_their_programs():
    batch = [{"keystrokes": "ls -la\n", "duration": 0.1}, {"keystrokes": "make all\n", "duration": 60}]
    text = "Next:\n" + as_json(analysis="a", plan="p", commands=batch, task_complete=False)
    assert tool_calls(text) == (("ls", "terminal"), ("make", "terminal"))
    assert tool_key(text) == ("make", "terminal")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{}</tool_call><tool_call>{}</tool_call>".format(
            as_json(name="read", arguments={"path": "a"}), as_json(name="bash", arguments={"command": "tox"})
        ),
        as_json(name="read", parameters={}) + "; " + as_json(name="bash", parameters={"command": "tox"}),
    ],
    ids=["hermes", "llama"],
)
def test_parallel_calls_are_all_found_and_the_slow_program_decides(text):
    assert tool_calls(text) == (("read",), ("tox", "bash"))
    assert tool_key(text) == ("tox", "bash")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The answer is 42.",
        'Bob is {"name": "Bob", "age": 3}, see [1] and f(x).',
        f"<think>I could run\n{FENCE}bash\nls\n{FENCE}\nbut I am done.</think>Done.",
        f"<think>I could run\n{FENCE}bash\nls\n{FENCE}",
        f"{FENCE}python\nprint(1)\n{FENCE}",
        as_json(analysis="a", commands=[], task_complete=True),
        "<tool_call>not json</tool_call>",
        as_json(name=["bash"], arguments={}),
    ],
)
def test_a_turn_without_a_call_has_no_key(text):
    assert tool_calls(text) == ()
    assert tool_key(text) == ()


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 42.",
        "Done.<|im_end|>\n",
        "<think>ls?</think>Done!</s>",
        "fertig<end_of_turn>",
        "x" * 2**17,
    ],
)
def test_a_text_that_ends_in_words_is_an_answer(text):
    assert is_answer(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<|im_end|>",
        "<think>I am done.",
        'of a long file", "mode": "w"}}\n</tool_call><|im_end|>',
        "the end of a long file\n</parameter>\n</function>\n</tool_call>",
        'of a long file"}<|call|>',
        f"print(1)\n{FENCE}",
        as_json(analysis="a", commands=[], task_complete=True),
    ],
)
def test_a_text_that_may_be_the_end_of_a_long_call_is_none(text):
    assert tool_calls(text) == () and not is_answer(text)


@pytest.mark.parametrize(
    "text",
    [
        f"All tests pass. To start it:\n{FENCE}bash\npython app.py\n{FENCE}\nDo you want more?",
        f"# Install\n{FENCE}bash\nnpm install\n{FENCE}\n</parameter>\n</function>\n</tool_call>",
    ],
    ids=["an answer to a person", "the end of a long file"],
)
def test_a_bash_block_of_an_agent_that_offers_tools_is_only_text(text):
    assert tool_calls(text, offers_tools=True) == ()
    assert tool_key(text, offers_tools=True) == ()


@pytest.mark.parametrize("name", [name for name, text in FORMATS.items() if FENCE not in text])
def test_calls_of_an_agent_that_offers_tools_are_found_beside_a_bash_block(name):
    text = f"{FENCE}bash\nls\n{FENCE}\n{FORMATS[name]}"
    assert tool_calls(text, offers_tools=True) == (PYTEST,)


def test_a_call_after_a_thought_counts_even_if_the_thoughts_beginning_was_cut_off():
    text = f"...or\n{FENCE}bash\nls\n{FENCE}</think>\n{FENCE}bash\nmake\n{FENCE}"
    assert tool_key(text) == ("make", "bash")


def test_only_the_last_block_counts():
    text = f"It failed before:\n{FENCE}bash\nls\n{FENCE}\nso\n{FENCE}bash\nmake\n{FENCE}"
    assert tool_calls(text) == (("make", "bash"),)


def test_a_tool_that_is_no_shell_is_keyed_by_its_name():
    assert tool_key(as_json(name="fetch_url", arguments={"url": "https://docs.python.org"})) == ("fetch_url",)
    assert tool_key(as_json(name="python", arguments={"code": "import time"})) == ("python",)


def test_a_clients_own_word_is_cleaned_like_any_key():
    assert levels("run\x00 tests\n") == ("run tests",)
    assert levels("\x07") == ()


@pytest.mark.parametrize(
    ("command", "key"),
    [
        ("ls", ("ls",)),
        ("cd /repo && make -j 8 all", ("make",)),
        ("sudo -u bob A=b timeout -k 5 30 cargo test", ("cargo",)),
        ("FOO=1 BAR=2 ./run_all.sh fast", ("run_all.sh",)),
        ("python3.11 -m pytest tests/a.py::test_b -x 2>&1 | tail -30", ("pytest",)),
        ("python -u -W ignore -m unittest", ("unittest",)),
        ("/venv/bin/python /repo/check.py --all", ("python",)),
        ("python - <<'EOF'\nimport pytest; pytest.main() | make\nEOF", ("python",)),
        ("cat <<EOF > a.sh\nmake\nEOF\nbash a.sh", ("bash",)),
        ("python manage.py test app", ("manage.py",)),
        ("bash -lc 'cd x; npm run build'", ("npm",)),
        ("for f in $(ls | head); do pytest $f; done", ("pytest",)),
        ("if grep -q x y; then cargo build; fi", ("cargo",)),
        ('git commit -m "$(cat <<EOF\nmake | pytest\nEOF\n)"', ("git",)),
        ("git -C /repo log --oneline | grep fix | head", ("git",)),
        ("find . -name '*.py' | xargs -I {} grep -l x {}", ("find",)),
        ("source venv/bin/activate && pip3 install -e .", ("pip",)),
        ("find . | xargs", ("xargs",)),
        ("(sleep 0.5; echo done) & wait", ("sleep",)),
        ("cat log | grep error", ("cat",)),
        ("echo hi # then; make", ("echo",)),
        ("make 2> log.txt", ("make",)),
        ("./prepare.sh && make all | tee log", ("make",)),
        ("echo 'make && pytest'", ("echo",)),
        ("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && git add -A && git diff --cached", ("submit",)),
        ("echo 'COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT' && cat patch.txt", ("submit",)),
        ("grep -r COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT .", ("grep",)),
        ("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUTS", ("echo",)),
        ("sudo", ("sudo",)),
        ("A=1", ()),
        ("", ()),
    ],
)
def test_a_command_is_keyed_by_the_program_that_takes_its_time(command, key):
    assert command_key(command, "bash") == (*key, "bash")


MARKED = (
    "``` ```bash\n \n``` <think> </think> <tool_call> </tool_call> <function= <parameter= > <arg_key> "
    '[TOOL_CALLS] [ARGS] {"name": {"commands":[ "arguments": "parameters": "keystrokes": {"function": '
    "{ } [ ] ( ) [f( a= \" ' \\ , : $( ` << <<A\n && | ; & # sudo cd -c bash make 9e999 \x00 \ud800"
)


MARKS = MARKED.split(" ")


def assert_well_formed(calls):
    assert len(calls) <= MAX_CALLS
    for level in (level for key in calls for level in key):
        assert level and level.isprintable() and len(level) <= MAX_KEY_CHARS


@given(st.text() | st.lists(st.sampled_from(MARKS) | st.text(max_size=5), max_size=60).map("".join))
def test_no_text_whatsoever_raises(text):
    assert_well_formed(tool_calls(text))
    assert_well_formed((command_key(text, "bash"),))
    tool_key(text)


@settings(max_examples=40)
@given(st.lists(st.sampled_from(MARKS), min_size=1, max_size=4).map("".join))
def test_no_megabyte_of_a_pattern_raises(pattern):
    assert_well_formed(tool_calls(pattern * (2**20 // len(pattern))))


HOSTILE = (
    *("`", "[", "{", "<", "\\", '"', '"\\', "{'", '{"a":', '[{"a":', '{"function":', "[f(", "<tool_call>"),
    *("<tool_call>{", "[TOOL_CALLS]{", "<function=a><parameter=b>", "<arg_key>", "```bash\n", "<think>"),
    *("$(", "\n[f(", "```bash\n<<A\n", '{"name":"a","arguments":{}}', " to=functions.a{", "\n", " "),
)


def calls_made(text: str) -> int:
    """Function calls, Python's and C's, that reading `text` takes: work, without a clock."""
    count = 0

    def counter(_frame, event, _arg):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # its callbacks are calls too
    sys.setprofile(counter)
    try:
        tool_calls(text)
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


@pytest.mark.parametrize("pattern", HOSTILE)
def test_the_work_grows_no_faster_than_the_text_and_not_at_all_beyond_the_tail(pattern):
    def of(chars):
        return (pattern * (chars // len(pattern) + 1))[:chars]

    quarter, half, whole = (calls_made(of(MAX_CHARS // part)) for part in (4, 2, 1))
    # a shallow nest may cost more calls than a deep one, which the stack cuts short
    assert whole - half <= 2.5 * max(0, half - quarter) + 200
    tail = of(2**20)[-MAX_CHARS:]
    assert abs(calls_made(of(2**20)) - calls_made(tail)) <= 8
    assert tool_calls(of(2**20)) == tool_calls(tail)


@pytest.mark.parametrize(
    ("opening", "closing"), [('{"function":', "}"), ('{"tool_calls":[', "]}"), ("[", "]")]
)
def test_json_nested_up_to_and_beyond_pythons_stack_raises_nothing(opening, closing):
    for depth in (*range(20, 1000, 40), 10_000):
        nested = opening * depth + "1" + closing * depth
        assert tool_calls(nested) == ()
        assert tool_calls('{"name":"sh","arguments":{"command":' + nested + "}}") in ((("sh",),), ())


def test_a_turn_has_only_so_many_calls():
    assert len(tool_calls("<tool_call>" + as_json(name="f", arguments={}) * 100)) == MAX_CALLS


def test_an_argument_that_holds_another_formats_tag_is_no_call() -> None:
    text = '<tool_call>\n{"name": "Read", "arguments": {"path": "<function=x"}}\n</tool_call>'
    assert tool_key(text)[-1] == "Read"
