"""What the tests share: the small model, real servers (one start per configuration), the traces' place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from experiments.tiny_model import make_model

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def model() -> Path:
    """The small model's directory, made once."""
    return make_model(ROOT / ".work" / "tiny-model")


@pytest.fixture(scope="session")
def traces() -> Path:
    """Real traces, where they are at hand: `TRACES_DIR`, else a folder beside the checkout."""
    folder = Path(os.environ.get("TRACES_DIR", ROOT.parent / "shared" / "traces"))
    if not folder.is_dir():
        pytest.skip(f"no traces in {folder} (set TRACES_DIR)")
    return folder
