"""What is shipped, and what it drags in."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CUDA = re.compile(r"^(nvidia|cuda|cupy|cufile|torchvision|torchaudio|triton)", re.IGNORECASE)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], check=True, timeout=120)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_the_wheel_holds_the_core_the_plugin_and_the_connectors_and_no_experiments(
    wheel: zipfile.ZipFile,
) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"continuum_lmcache", "connectors"}
    for module in ("vllm_plugin/scheduler.py", "console/app.py", "recordings/reader.py"):
        assert f"continuum_lmcache/{module}" in wheel.namelist()


def test_vllm_finds_the_plugin_by_its_entry_point(wheel: zipfile.ZipFile) -> None:
    text = wheel.read(next(n for n in wheel.namelist() if n.endswith("entry_points.txt"))).decode()
    assert "[vllm.general_plugins]\ncontinuum = continuum_lmcache.vllm_plugin:register" in text


def test_the_console_script_is_there(wheel: zipfile.ZipFile) -> None:
    text = wheel.read(next(n for n in wheel.namelist() if n.endswith("entry_points.txt"))).decode()
    assert "[console_scripts]\ncontinuum-lmcache = continuum_lmcache.console.app:main" in text


def test_the_cpu_set_names_no_cuda_package(wheel: zipfile.ZipFile) -> None:
    metadata = Parser().parsestr(
        wheel.read(next(n for n in wheel.namelist() if n.endswith("METADATA"))).decode()
    )
    needs = metadata.get_all("Requires-Dist") or []
    cpu = [need for need in needs if "extra" not in need or 'extra == "cpu"' in need]
    assert any(need.startswith("torch==") for need in cpu)
    assert not [need for need in cpu if CUDA.match(need) or need.startswith(("vllm", "lmcache"))]
    lock = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    assert not [line for line in lock if CUDA.match(line)]
    pin = re.compile(r"[\w.-]+==[^\s;]+(; (platform_machine|python_version) \S+ \S+)?")
    assert all(pin.fullmatch(line) for line in lock if not line.startswith("#"))
