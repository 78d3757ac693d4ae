"""Finds the program in a shell command that takes its time.

Not a shell: quotes, substitutions, redirections and here-documents are parsed only to find
the right words; nothing is expanded, and no text raises.
"""

from __future__ import annotations

import re

from continuum_lmcache.types import ToolKey

MAX_COMMAND_CHARS = 2048  # later text can hardly change which program is the slow one
MAX_KEY_CHARS = 64
MAX_NESTED_SHELLS = 2

HERE_DOCUMENT = re.compile(  # one without an end is all the rest
    r"<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*)\n(?:(?:.*?\n)??[ \t]*\2(?=\s|\Z)|.*\Z)", re.DOTALL
)
PIECE = re.compile(
    r"(?P<space>[ \t\r]+|\\\n|\#[^\n]*)"
    r"|(?P<redirect>[0-9]{0,2}(?:&>>?|<<<?-?|<>|>>|>\||[<>]&?)[ \t]*)"
    r"|(?P<end>&&|\|[|&]?|;+|&|\n|[()])"
    r"|(?P<word>(?:'[^']*'?|\"(?:[^\"\\]|\\.)*\"?|`[^`]*`?|\$\([^)]*\)?|[^\s'\"\\;&|()<>`]|\\.)+)",
    re.DOTALL,
)


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SUBMITS = re.compile(r"\s*echo ['\"]?COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\b")
"""mini-swe-agent ends where a command's output begins with this text."""
SUBMIT = "submit"

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
HEADERS = names("for case select function fi done esac")
KEYWORDS = names("if then else elif while until do ! { }")
SHELLS = names("bash sh zsh dash")
WRAPPERS = {"sudo": 0, "timeout": 1, "xargs": 0}
"""Programs that run another one, and how many operands of their own come before it."""

VALUED = {  # options whose value is the next word
    "sudo": names("-u -g -C -h"),
    "timeout": names("-k -s --signal --kill-after"),
    "xargs": names("-I -n -P -L -d -a -s"),
    "python": names("-W -X"),
}

# They end at once, wherever they are.
INSTANT = names(
    "cd source . export set unset alias echo printf true false test [ [[ : pwd mkdir touch chmod which type"
    " exit return trap shopt ulimit pushd popd local declare read"
)
# They read and write files, or end when their input does.
PLAIN = INSTANT | names(
    "head tail grep egrep sed awk sort uniq wc tee cut tr cat less more column nl jq find ls rg ack diff stat"
    " file du cp mv rm ln tree xxd vi nano"
)
SLOW = names(
    "pytest tox nox unittest nosetests make cmake ninja cargo go npm yarn pnpm mvn gradle docker pip conda"
    " apt apt-get uv poetry sleep curl wget rustc gcc g++ bazel jest ctest manage.py setup.py dotnet"
)


def command_key(command: str, tool: str) -> ToolKey:
    """The program that makes this command last, with its tool: ("pytest", tool).

    Wrappers (`sudo`, `timeout 30`, `A=b`, `bash -c`, `python -m`) are skipped. In a
    compound the step that is likely to last longest decides, the first of equals: programs known
    to be slow, then unknown ones, then file tools and filters (`| tail`), then those that end at once
    (`cd`, `echo`). The learned gaps are not used, so a command always has the same key.
    """
    if SUBMITS.match(command):
        return levels(SUBMIT, tool)
    return levels(slowest(command[:MAX_COMMAND_CHARS], MAX_NESTED_SHELLS), tool)


def levels(*given: str) -> ToolKey:
    """A key from its levels, most specific first, cleaned, bounded, without the empty ones."""
    return tuple(filter(None, map(clean, given)))


def clean(name: str) -> str:
    """At most 64 printable characters on one line: keys become metric labels and file contents."""
    head = "".join(c if c.isprintable() else " " for c in name[: 4 * MAX_KEY_CHARS])
    return " ".join(head.split())[:MAX_KEY_CHARS].rstrip()


def slowest(command: str, nested: int) -> str:
    """The program of the step likely to last longest; "" if none runs any."""
    found = (program(words, nested) for words in steps(command))
    return max(filter(None, found), key=weight, default="")


def weight(name: str) -> int:
    """How much a program's time is likely to count in a compound, 0 to 3."""
    return 3 if name in SLOW else 2 if name not in PLAIN else 1 if name not in INSTANT else 0


def steps(command: str) -> list[list[str]]:
    """The simple commands of a compound, as words without quotes, redirections and here-documents."""
    found: list[list[str]] = [[]]
    is_target = False
    for piece in PIECE.finditer(HERE_DOCUMENT.sub(r"\3\n", command)):
        if piece.lastgroup == "end":
            found.append([])
        elif piece.lastgroup == "word" and not is_target:
            found[-1].append(re.sub(r"['\"\\]", "", piece[0]))
        is_target = piece.lastgroup == "redirect"
    return [words for words in found if words]


def program(words: list[str], nested: int) -> str:
    """The program that a simple command runs in the end; "" if it runs none: the header of a loop."""
    words = unwrapped(words)
    if not words or words[0] in HEADERS:
        return ""
    name, rest = basename(words[0]), words[1:]
    if name in SHELLS and nested and len(rest) > 1 and re.match(r"-[a-z]*c", rest[0]):
        return slowest(rest[1], nested - 1) or name
    if name == "python":
        rest = after_options(name, rest)
        if rest[:1] == ["-m"] and len(rest) > 1:
            return basename(rest[1])
        if rest and basename(rest[0]) in SLOW:  # python manage.py test, python setup.py build
            return basename(rest[0])
    return name


def unwrapped(words: list[str]) -> list[str]:
    """The words from the program on: after keywords, assignments and programs that run another."""
    while words:
        name = basename(words[0])
        if words[0] in KEYWORDS or ASSIGNMENT.match(words[0]):
            words = words[1:]
        elif name in WRAPPERS and (rest := after_options(name, words[1:])[WRAPPERS[name] :]):
            words = rest
        else:
            break
    return words


def after_options(name: str, words: list[str]) -> list[str]:
    """The words after a program's leading options and their values; not after an interpreter's -m, -c."""
    valued, stops, at = VALUED.get(name, names("")), ("-m", "-c", "-") if name == "python" else (), 0
    while at < len(words) and words[at].startswith("-") and words[at] not in stops:
        at += 2 if words[at] in valued else 1
    return words[at:]


def basename(word: str) -> str:
    """The program's name without its path and version: /venv/bin/python3.11 is python."""
    name = word.rstrip("/").rpartition("/")[2]
    if name.startswith(("python", "pip")):
        name = name.rstrip("0123456789.")
    return "pytest" if name == "py.test" else name
