"""Runs vLLM's own scheduler tests on stock and on our classes, and compares the results.

    python -m experiments.trust.own_tests                 # the installed version, every file
    python -m experiments.trust.own_tests --quick         # the files that run in CI

The tests come from the source archive of the release under test (packages.py). Models that only a
hub has are absent, so the tests that need them fail alike for every class; facebook/opt-125m is the
one that most of them name, and a folder of that name with a config of its shape stands in for it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from experiments.tables import plain
from experiments.tiny_model import make_model
from experiments.trust.packages import WORK, source_tests

ROOT = Path(__file__).resolve().parents[2]
QUICK = (  # about half a minute of CPU, most of it vLLM's import
    "v1/core/test_async_scheduler.py",
    "v1/core/test_priority_preemption_bug.py",
    "v1/core/test_worker_slot_overflow.py",
)
FILES = (
    *QUICK,
    "v1/core/test_deferred_block_free.py",
    "v1/core/test_scheduler.py",
    "v1/core/test_priority_scheduler_random.py",
    "v1/core/test_prefix_replay.py",
    "v1/core/test_swa_inflight_window_free.py",
    "v1/streaming_input/test_scheduler_streaming.py",
    "v1/kv_connector/unit/test_cache_pollution_prevention.py",
    "v1/kv_connector/unit/test_error_propagation.py",
    "v1/kv_connector/unit/test_invalid_blocks_correctness.py",
    "v1/kv_connector/unit/test_kv_load_failure_recovery.py",
    "v1/kv_connector/unit/test_remote_decode_lifecycle.py",
    "v1/kv_connector/unit/test_remote_prefill_lifecycle.py",
)
STOCK, SCHEDULER = "stock", "OWN_TESTS_SCHEDULER"  # the variable has that, or a policy's name
POLICIES = ("fcfs", "continuum")
PRIORITY = "vLLM's other policy, `priority`, which is never set beneath our class: "
CLOCK = PRIORITY + "the test dates arrivals by hand, and we order by when the engine got the request"
DEAF = PRIORITY + "our `fcfs` is vLLM's fcfs, which does not ask for a priority"
OURS_ABOARD = "our totals ride in kv_connector_stats, and StatLoggerManager.record takes them out again"
BARE = "the test makes a scheduler without __init__, so without a TurnLifecycle"
EXPLAINED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "test_scheduler_kv_connector_stats": (POLICIES, OURS_ABOARD),
    "test_abort_request_when_structured_output_fsm_cannot_advance": (POLICIES, BARE),
    "test_priority_scheduling_arrival_time_tiebreaker": (POLICIES, CLOCK),
    "test_priority_scheduling_equal_priority_preemption": (POLICIES, CLOCK),
    "test_priority_scheduling_fcfs_fallback": (POLICIES, CLOCK),
    "test_priority_scheduling_mixed_priority_and_arrival": (POLICIES, CLOCK),
    "test_priority_scheduling_basic_ordering": (("fcfs",), DEAF),
    "test_priority_scheduling_heap_property": (("fcfs",), DEAF),
    "test_priority_scheduling_preemption_victim_selection": (("fcfs",), DEAF),
    "test_priority_scheduling_waiting_queue_order": (("fcfs",), DEAF),
    "test_priority_scheduling_with_limited_slots": (("fcfs",), DEAF),
    "test_reset_prefix_cache_priority_does_not_over_admit_worker_slot": (("fcfs",), DEAF),
}
"""Tests that may come out otherwise: for which policies, and why."""
STANDIN = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float16",
}

Outcomes = dict[str, str]  # test id -> passed, failed, error or skipped


@dataclass(frozen=True, slots=True)
class Difference:
    """A test with another result for our class than for stock."""

    policy: str
    test: str
    stock: str
    ours: str


def standin_models(tree: Path) -> None:
    """Put a model's config and tokenizer where vLLM's tests name one, relative to their folder."""
    tiny = make_model(WORK / "tiny-model")
    for name in ("facebook/opt-125m", "facebook/opt-350m"):
        folder = tree / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(STANDIN))
        for part in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny / part, folder / part)


def run(tree: Path, files: Sequence[str]) -> dict[str, Outcomes]:
    """Run the files that this release has: stock and each policy.

    Raises FileNotFoundError if pytest wrote no report; its log is beside it.
    """
    names = (STOCK, *POLICIES)
    for name in names:
        (tree / f"{name}.xml").unlink(missing_ok=True)
    present = [f"tests/{name}" for name in files if (tree / "tests" / name).is_file()]
    environ = {n: v for n, v in os.environ.items() if not n.startswith(("CONTINUUM_", "PYTEST_"))}
    environ |= {
        "PYTHONPATH": os.pathsep.join((str(tree), str(ROOT))),
        "HF_HUB_OFFLINE": "1",
        "CONTINUUM_HONOR_PRIORITY": "true",
    }
    confined = ["-c", os.devnull, "--rootdir=.", "--confcutdir=tests/v1"]  # the top conftest wants a hub
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *confined]
    command += ["-p", "experiments.trust.swapped", "-o", "junit_family=xunit1", *present]
    running = []
    for name in names:
        with (tree / f"{name}.log").open("w") as log:
            report = ["--junitxml", f"{name}.xml"]
            env = environ | {SCHEDULER: name}
            running.append(subprocess.Popen([*command, *report], cwd=tree, env=env, stdout=log, stderr=log))
    for one in running:
        one.wait()
    return {name: outcomes(tree / f"{name}.xml") for name in names}


def outcomes(report: Path) -> Outcomes:
    """Every test of a JUnit report. Raises FileNotFoundError if pytest wrote none."""
    found: Outcomes = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        name = f"{case.get('classname')}::{case.get('name')}"
        found[name] = {"failure": "failed"}.get(kinds[0], kinds[0]) if kinds else "passed"
    return found


def differences(stock: Outcomes, ours: Mapping[str, Outcomes]) -> list[Difference]:
    """The tests, by name, with another result; a missing test counts too."""
    return [
        Difference(policy, test, stock.get(test, "missing"), found.get(test, "missing"))
        for policy, found in ours.items()
        for test in sorted(stock.keys() | found.keys())
        if stock.get(test) != found.get(test) and not is_explained(policy, test)
    ]


def is_explained(policy: str, test: str) -> bool:
    """Whether EXPLAINED names this difference."""
    policies, _ = EXPLAINED.get(test.rpartition("::")[2], ((), ""))
    return policy in policies


def compare(release: str, files: Sequence[str]) -> tuple[Outcomes, dict[str, Outcomes]]:
    """Stock's outcomes and ours, by policy. Raises Unreachable without the source archive."""
    tree = source_tests(release)
    standin_models(tree)
    found = run(tree, files)
    return found.pop(STOCK), found


def main(
    release: Annotated[str, typer.Option(help="of vLLM")] = version("vllm").partition("+")[0],
    quick: Annotated[bool, typer.Option(help="only the files that run in CI")] = False,
) -> None:
    """Print the counts and every difference; exit status 1 if there is one."""
    stock, ours = compare(release, QUICK if quick else FILES)
    rows = [["scheduler", *(kinds := ("passed", "failed", "error", "skipped"))]]
    for name, found in {STOCK: stock, **ours}.items():
        counts = Counter(found.values())
        rows.append([name, *(str(counts[kind]) for kind in kinds)])
    console = Console()
    console.print(plain(rows, f"vLLM {release}'s own tests"))
    found = differences(stock, ours)
    for each in found:
        console.print(f"{each.policy}: {each.test}: stock {each.stock}, ours {each.ours}", markup=False)
    raise typer.Exit(bool(found) or not stock)


if __name__ == "__main__":
    typer.run(main)
