"""Fetches released packages by name with pip: nothing of them is committed; all is under .work/."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WORK = Path(__file__).resolve().parents[2] / ".work"


class Unreachable(RuntimeError):
    """pip cannot get a package here."""


def source_tests(version: str, work: Path = WORK) -> Path:
    """A folder that holds `tests/` of vLLM's source archive. Raises Unreachable.

    pip wants a package's metadata before it keeps the archive, and vLLM's needs a build: it fails,
    and `--no-clean` leaves the unpacked tree, which is enough.
    """
    found = work / "vllm-tests" / version
    if (found / "tests").is_dir():
        return found
    found.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=found.parent) as scratch:
        error = pip_download(f"vllm=={version}", Path(scratch), "--no-binary", ":all:", "--no-clean")
        trees = [tests.parent for tests in Path(scratch).glob("*/vllm_*/tests")]
        if not trees:
            raise Unreachable(f"the source archive of vllm {version} cannot be had: {error}")
        found.mkdir(exist_ok=True)
        shutil.move(trees[0] / "tests", found / "tests")
    return found


def unpacked(name: str, version: str, work: Path = WORK) -> Path:
    """A folder with one wheel's files, as on a path: no dependency of it is installed. Raises Unreachable."""
    found = work / "wheels" / f"{name}-{version}"
    if found.is_dir():
        return found
    found.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=found.parent) as scratch:
        error = pip_download(f"{name}=={version}", Path(scratch), "--only-binary", ":all:")
        wheels = list(Path(scratch).glob("*.whl"))
        if not wheels:
            raise Unreachable(f"no wheel of {name} {version} can be had: {error}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(Path(scratch) / "tree", wanted(wheel.namelist()))
        shutil.move(Path(scratch) / "tree", found)
    return found


def wanted(names: list[str]) -> list[str]:
    """Without a CUDA build's libraries: no kernel runs here, and they are gigabytes."""
    is_cuda = not any("cpu" in name for name in names if name.endswith("METADATA"))
    return [name for name in names if not (is_cuda and name.startswith("vllm/") and name.endswith(".so"))]


def pip_download(requirement: str, into: Path, *options: str) -> str:
    """Run pip in `into`. Returns its last error line, or ''."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--no-deps", "--no-build-isolation", "--dest", str(into), *options, requirement],
        env={**os.environ, "TMPDIR": str(into)},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line.strip() for line in done.stderr.splitlines() if line.startswith(("ERROR", "error"))]
    return errors[-1] if errors else ""
