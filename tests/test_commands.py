"""Every command that README and docs name exists and takes the options shown; some run by their path too."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
EXPERIMENTS = ROOT / "experiments" / "README.md"
PAGES = [README, EXPERIMENTS, *sorted((ROOT / "docs").rglob("*.md")), ROOT / "profiles" / "README.md"]
OURS = re.compile(r"(python (-m )?(experiments|profiles)\b|continuum-lmcache )")
BY_PATH = ("experiments.offload_sweep", "profiles.")  # modules that run by it
RUNNER = ROOT / "tests" / "commands_in_one_process.py"


def commands(page: Path) -> list[str]:
    """The commands in a page's indented blocks and between backquotes, without comments and prompts."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    blocks = re.findall(r"^ {4}(?:\$ )?(\S.*)$", text, re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", text)
    return [" ".join(re.sub(r"\s#.*", "", found).split()) for found in (*blocks, *spans)]


def asked_for_help(command: str) -> list[str]:
    return [*command.removesuffix(" --help").split(), "--help"]


def by_path(command: list[str]) -> list[str]:
    """The same script, named by its file."""
    return ["python", command[2].replace(".", "/") + ".py", *command[3:]]


def all_of_them() -> list[list[str]]:
    """README's and the experiments' with each set of options; BY_PATH also so."""
    shown = {page: [asked_for_help(c) for c in commands(page) if OURS.match(c)] for page in PAGES}
    firsts = shown[README] + shown[EXPERIMENTS]
    distinct = {(*c[:4], *sorted(word for word in c if word.startswith("-"))): c for c in firsts}
    modules = {
        c[2]: c[:3] for page in PAGES for c in shown[page] if c[1] == "-m" and c[2].startswith(BY_PATH)
    }
    return [*distinct.values(), *(by_path([*c, "--help"]) for c in modules.values())]


COMMANDS = all_of_them()


@pytest.fixture(scope="module")
def ran() -> dict[str, tuple[int, str]]:
    """Exit status and output of each; one process for all, as importing vLLM takes seconds."""
    runner = subprocess.run(
        [sys.executable, str(RUNNER)], input=json.dumps(COMMANDS), capture_output=True, text=True, timeout=850
    )
    assert runner.returncode == 0, runner.stderr
    results = json.loads(runner.stdout.splitlines()[-1])
    return {" ".join(command): tuple(result) for command, result in zip(COMMANDS, results, strict=True)}


@pytest.mark.parametrize("command", [" ".join(command) for command in COMMANDS])
def test_a_command_of_the_pages_runs(ran: dict[str, tuple[int, str]], command: str) -> None:
    status, output = ran[command]
    assert status == 0 and "usage:" in output.lower(), output


def test_the_pages_name_the_commands_that_there_are() -> None:
    """So that the test above never becomes empty."""
    named = {command[0] if command[0] != "python" else command[1] for command in COMMANDS}
    assert named >= {"continuum-lmcache", "-m", "experiments/offload_sweep.py", "profiles/measure.py"}


def test_the_figures_that_the_pages_name_are_known() -> None:
    from experiments.offload_sweep import Engine, plans_named

    shown = [c.split() for page in PAGES for c in commands(page)]
    shown = [words[3:] for words in shown if words[:3] == ["python", "-m", "experiments.offload_sweep"]]
    for words in shown:
        figures = words[: next((i for i, word in enumerate(words) if word.startswith("-")), None)]
        plans_named(figures, Engine.LIVE if "live" in words else Engine.SIM)
    assert len(shown) > 10


TARGETS = sorted({c.split()[1] for page in PAGES for c in commands(page) if c.startswith("make ")})


@pytest.mark.parametrize("target", TARGETS)
def test_a_make_target_of_the_pages_is_there(target: str) -> None:
    made = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
