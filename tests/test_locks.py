"""The lock files: Ray adds packages to the base set and changes none, and no file names a package index."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"


def pins(name: str) -> dict[str, str]:
    """A lock file's versions, by the packages' normal names."""
    lines = (line for line in (LOCKS / name).read_text().splitlines() if line and not line.startswith("#"))
    return {
        re.sub(r"[-_.]+", "-", left).lower(): right for left, _, right in (x.partition("==") for x in lines)
    }


def test_ray_comes_with_sixteen_packages_beside_the_base_set() -> None:
    base, ray = pins("cpu.lock"), pins("ray.lock")
    assert len(ray) == 16 and all(ray.values())
    both = {
        name: base[name].partition(";") for name in base.keys() & ray.keys()
    }  # six: where Python is newer
    assert all(marker and version == ray[name] for name, (version, _, marker) in both.items())
    (wanted,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][
        "fleet"
    ]
    low, high = re.fullmatch(r"ray\[serve\]>=([\d.]+),<([\d.]+)", wanted).groups()  # type: ignore[union-attr]
    versions = [tuple(int(part) for part in text.split(".")) for text in (low, ray["ray"], high)]
    assert versions[0] <= versions[1] < versions[2]


def test_a_lock_file_says_what_and_not_from_where() -> None:
    for path in LOCKS.glob("*.lock"):
        assert not re.search(r"://|--(?:extra-)?index|--find-links|@ ", path.read_text()), path
