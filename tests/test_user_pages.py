"""The pages for users: one thought a sentence, few numbers, no commit and no date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_NUMBERS = 4
WRITTEN_BY_A_COMMAND = re.compile(r"<!-- .*?-->.*?<!-- /.*?-->", re.DOTALL)
NO_PROSE = re.compile(r"`[^`]*`|\]\([^)]*\)|^    .*$|^\|.*$|^```.*?^```", re.MULTILINE | re.DOTALL)
NAMED = r"\b(vLLM|LMCache|Python|HTTP|decision|eq\.|arXiv)(?:'s)?"
VERSIONS = re.compile(NAMED + r" [\d.]+(?:(?:,| to| and) [\d.]+)*")
NUMBER = re.compile(r"(?<![\w.#-])\d[\d.,]*(?![\w])")


def prose(page: Path) -> str:
    """The page's sentences, without tables, code, links' targets, versions and what a command writes."""
    text = WRITTEN_BY_A_COMMAND.sub("", page.read_text())
    return VERSIONS.sub("", NO_PROSE.sub("", text))


def sentences(text: str) -> list[str]:
    parts = re.split(r"(?<=[.!?:])\s+(?=[A-Z*`(])|\n\s*\n|\n- |\n\d+\. ", text)
    return [" ".join(part.split()) for part in parts]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_has_more_than_four_numbers(page: Path) -> None:
    full = [s for s in sentences(prose(page)) if len(NUMBER.findall(s)) > MOST_NUMBERS]
    assert not full


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_names_a_commit_a_date_or_a_seed(page: Path) -> None:
    commit, date = r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b", r"\b20\d\d-\d\d-\d\d\b"
    assert not re.findall(rf"{commit}|{date}|\bseeds? \d", prose(page))


def test_numbers_are_counted_by_sentence(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("vLLM 0.30 took 1, 2.5, 3 and 4 s\nfor 5 runs. Then `6`.\n\n| 7 |\n|---|\n    9 10\n")
    assert [len(NUMBER.findall(sentence)) for sentence in sentences(prose(page))] == [5, 0, 0]


def test_the_readme_is_short_and_its_first_command_comes_early() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 110
    assert next(i for i, line in enumerate(lines) if line.startswith("    ")) < 25
