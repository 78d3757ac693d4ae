"""The command that prints what a release of vLLM changed where this plugin holds on to it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import vllm

from experiments.trust.seams import SEAMS, changes

HERE = Path(vllm.__file__).parents[1]


def test_each_function_that_it_names_is_in_the_installed_vllm() -> None:
    assert changes(HERE, HERE) == {}


def test_a_changed_function_is_shown_and_a_comment_is_no_change(tmp_path: Path) -> None:
    for file in SEAMS:
        (tmp_path / "vllm" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / "vllm" / file, tmp_path / "vllm" / file)
    file = tmp_path / "vllm" / "v1/metrics/loggers.py"
    file.write_text("# a comment\n" + file.read_text())
    assert changes(HERE, tmp_path) == {}
    file.write_text(file.read_text().replace("def record(", "def record_all("))
    (name,) = changes(HERE, tmp_path)
    assert name == "v1/metrics/loggers.py: StatLoggerManager.record"
