"""N-gram drafts beside `continuum`, on vLLM's own engine: experiments/trust/others.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.exactness import reference
from experiments.forking_vllm import fork_from_now_on
from experiments.trust.others import DRAFTS, OURS, measured, options_of


@pytest.mark.real
def test_with_drafts_every_token_is_the_models_and_some_drafts_are_accepted(
    model: Path,  # noqa: ARG001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork_from_now_on(monkeypatch.setattr)
    found = measured(options_of(DRAFTS, tmp_path), OURS, reference(), tmp_path / "log")
    assert found["wrong"] == 0 and found["tokens"] > 0, found
    assert 0 < found["accepted"] < found["drafted"], found
    assert found["gpu"] > 0, "later turns hit what earlier ones left"
