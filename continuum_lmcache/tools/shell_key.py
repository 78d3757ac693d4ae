"""From a shell command to the program that takes its time."""

from __future__ import annotations

import re

from continuum_lmcache.tools.shell_lexer import steps
from continuum_lmcache.types import ToolKey

MAX_COMMAND_CHARS = 2048  # what follows can hardly change which program is the slow one
MAX_KEY_CHARS = 64
MAX_NESTED_SHELLS = 2
MAX_OPERANDS = 16


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
HEADERS = names("for case select function fi done esac")
KEYWORDS = names("if then else elif while until do ! { }")
SHELLS = names("bash sh zsh dash")
RUNNERS = {"uv": "run", "poetry": "run", "pipenv": "run", "hatch": "run", "bundle": "exec"}
WRAPPERS = {"sudo": 0, "env": 0, "timeout": 1, "nice": 0, "ionice": 0, "stdbuf": 0, "xargs": 0, "npx": 0}
WRAPPERS |= dict.fromkeys(("nohup", "time", "command", "exec", "builtin", "setsid"), 0)
"""Programs that run another one, and how many operands of their own come before it."""

VALUED = {  # options whose value is the next word
    "sudo": names("-u -g -C -h"),
    "env": names("-u -C"),
    "timeout": names("-k -s --signal --kill-after"),
    "nice": names("-n"),
    "ionice": names("-c -n"),
    "stdbuf": names("-i -o -e"),
    "xargs": names("-I -n -P -L -d -a -s"),
    "python": names("-W -X"),
    "pytest": names("-k -m -n -c -p -W -o -r --tb --maxfail --durations"),
    "git": names("-C -c"),
    "make": names("-C -f -j"),
}

# Over at once, wherever it stands.
INSTANT = names(
    "cd source . export set unset alias echo printf true false test [ [[ : pwd mkdir touch chmod which type"
    " exit return trap shopt ulimit pushd popd local declare read"
)
# Read and write files, or end when their input does. Their operands are patterns and paths: these say
# nothing about the time, and no two are alike.
PLAIN = INSTANT | names(
    "head tail grep egrep sed awk sort uniq wc tee cut tr cat less more column nl jq find ls rg ack diff stat"
    " file du cp mv rm ln tree xxd vi nano"
)
SLOW = names(
    "pytest tox nox unittest nosetests make cmake ninja cargo go npm yarn pnpm mvn gradle docker pip conda"
    " apt apt-get uv poetry sleep curl wget rustc gcc g++ bazel jest ctest manage.py setup.py dotnet"
)


def command_key(command: str, tool: str) -> ToolKey:
    """Which program makes this command last? ("pytest tests/unit", "pytest", tool).

    Wrappers (`sudo`, `timeout 30`, `env A=b`, `bash -c`, `python -m`) are looked through. Of a
    compound the step that is likely to last longest decides, the first of equals: programs known
    to be slow, then unknown ones, then file tools and filters (`| tail`), then what is over at once
    (`cd`, `echo`). The gaps learned so far are not asked, so that a command always has the same key.
    """
    found = deciding(steps(command[:MAX_COMMAND_CHARS]), MAX_NESTED_SHELLS)
    if found is None:
        return levels(tool)
    name, argument = found
    return levels(f"{name} {argument}" if argument else "", name, tool)


def levels(*given: str) -> ToolKey:
    """A key from its levels, most specific first, cleaned, bounded, without the empty ones."""
    return tuple(filter(None, map(clean, given)))


def clean(name: str) -> str:
    """At most 64 printable characters on one line: keys become metric labels and file contents."""
    head = name[: 4 * MAX_KEY_CHARS]
    if not head.isprintable():
        head = "".join(c if c.isprintable() else " " for c in head)
    return " ".join(head.split())[:MAX_KEY_CHARS].rstrip()


def deciding(found: list[list[str]], nested: int) -> tuple[str, str] | None:
    """Program and first meaningful argument of the step likely to last longest."""
    programs = [named for words in found if (named := program(words, nested))]
    return max(programs, key=lambda named: weight(named[0]), default=None)


def weight(name: str) -> int:
    """How much a program's time is likely to count in a compound, 0 to 3."""
    return 3 if name in SLOW else 2 if name not in PLAIN else 1 if name not in INSTANT else 0


def program(words: list[str], nested: int) -> tuple[str, str] | None:
    """The program that a simple command runs in the end, and its first meaningful argument or "".

    None where it runs none: an assignment, the header of a loop.
    """
    words = unwrapped(words)
    if not words or words[0] in HEADERS:
        return None
    name, rest = basename(words[0]), words[1:]
    if name in SHELLS and nested and len(rest) > 1 and re.match(r"-[a-z]*c", rest[0]):
        return deciding(steps(rest[1]), nested - 1) or (name, "")
    if name == "python":
        name, rest = python_program(after_options("python", rest))
    return name, "" if name in PLAIN else operand(name, rest)


def python_program(rest: list[str]) -> tuple[str, list[str]]:
    """What an interpreter runs: a module, a known tool's script, else itself with the script's name."""
    if rest[:1] == ["-m"] and len(rest) > 1:
        return basename(rest[1]), rest[2:]
    if rest and basename(rest[0]) in SLOW:  # python manage.py test, python setup.py build
        return basename(rest[0]), rest[1:]
    return "python", [basename(word) for word in rest[:1]]


def unwrapped(words: list[str]) -> list[str]:
    """The words from the program on: behind keywords, assignments and programs that run another."""
    while words:
        name = basename(words[0])
        if name in WRAPPERS:
            rest = after_options(name, words[1:])[WRAPPERS[name] :]
        elif name in RUNNERS and words[1:2] == [RUNNERS[name]]:
            rest = words[2:]
        elif words[0] in KEYWORDS or ASSIGNMENT.match(words[0]):
            words = words[1:]
            continue
        else:
            break
        if not rest:
            break  # `time`, `xargs` and the like alone
        words = rest
    return words


def after_options(name: str, words: list[str]) -> list[str]:
    """The words behind a program's leading options and these options' values; not behind -m, -c, -."""
    valued, at = VALUED.get(name, names("")), 0
    while at < len(words) and words[at].startswith("-") and words[at] not in stops(name):
        at += 2 if words[at] in valued else 1
    return words[at:]


def stops(name: str) -> tuple[str, ...]:
    """Options after which an interpreter's program comes."""
    return ("-m", "-c", "-") if name == "python" else ()


def basename(word: str) -> str:
    """The program's name without its path and version: /venv/bin/python3.11 is python."""
    name = word.rstrip("/").rpartition("/")[2]
    if name.startswith(("python", "pip")):
        name = name.rstrip("0123456789.")
    return "pytest" if name == "py.test" else name


def operand(name: str, words: list[str]) -> str:
    """The first word that is neither an option nor its value, without the test inside the file."""
    if name == "python" and words[:1] in (["-c"], ["-"]):
        return words[0]
    valued, skip = VALUED.get(name, names("")), False
    for word in words[:MAX_OPERANDS]:
        if not skip and not word.startswith(("-", "$")):
            return word.partition("::")[0].rstrip("/")
        skip = not skip and word in valued
    return ""
