"""The wheel's contents, its dependencies, and that it serves without the checkout on the path, in bfloat16.

vLLM spawns its processes here, as it does for users. Other tests of servers fork them and compute in float32.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from serving import CHUNK, HTTP, Server, ids
from waiting import wait_for

from experiments.server import CPU_ARGS, CPU_ENV, reserved_port, stop, wait_until_healthy

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("continuum_lmcache", "connectors", "profiles", "experiments", "docs", "lmcache.json")
SOURCES += ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
NAMED_BY_USERS = ("connectors.lmcache_mp", "connectors.lmcache_mp_module")
FIND = "import sys, importlib.util as u\nfor m in sys.argv[1:]: print(u.find_spec(m).origin)"
CUDA = re.compile(r"^(nvidia|cuda|cupy|cufile|torchvision|torchaudio|triton)", re.IGNORECASE)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy: setuptools leaves a folder, whose files would be packed into the next wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    sources.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, sources / name)
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    pip("wheel", *options, str(sources))
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, env=environment(), check=True, timeout=600)


def environment() -> dict[str, str]:
    """Without the checkout on Python's path."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PROMETHEUS_MULTIPROC_DIR")}


@pytest.fixture(scope="module")
def python(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel; other packages come from the current environment."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    pip("--python", str(home / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel.filename))
    packages = next(home.glob("lib/python*/site-packages"))
    (packages / "behind.pth").write_text(sysconfig.get_path("purelib"))  # vLLM and LMCache
    return home / "bin" / "python"


def test_the_wheel_holds_the_core_the_plugin_and_the_connectors_and_no_experiments(
    wheel: zipfile.ZipFile,
) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"continuum_lmcache", "connectors"}
    for module in ("vllm_plugin/scheduler.py", "console/app.py", "recordings/reader.py"):
        assert f"continuum_lmcache/{module}" in wheel.namelist()


def test_the_wheel_brings_what_the_console_writes_and_runs(wheel: zipfile.ZipFile) -> None:
    shipped = ("lmcache.json", "profiles/measure.py", "profiles/h100-llama-3.1-8b.yaml")
    shipped += ("experiments/estimate.py", "docs/grafana/continuum.json", "docs/compose/compose.yaml")
    for name in (*shipped, "docs/kubernetes.yaml", "docs/ray.yaml"):
        assert f"continuum_lmcache/shipped/{name}" in wheel.namelist()
    assert {"continuum_lmcache/py.typed", "connectors/py.typed"} <= set(wheel.namelist())


def metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(wheel.read(next(n for n in wheel.namelist() if n.endswith("METADATA"))).decode())


def test_its_page_has_no_link_that_is_dead_away_from_the_repository(wheel: zipfile.ZipFile) -> None:
    page = metadata(wheel).get_payload()
    assert "# continuum-lmcache" in page
    assert not re.findall(r"\]\((?!https?:)[^)]*\)", page)


def test_the_console_script_is_there(wheel: zipfile.ZipFile) -> None:
    text = wheel.read(next(n for n in wheel.namelist() if n.endswith("entry_points.txt"))).decode()
    assert "[console_scripts]\ncontinuum-lmcache = continuum_lmcache.console.app:main" in text


def test_the_cpu_set_names_no_cuda_package(wheel: zipfile.ZipFile) -> None:
    needs = metadata(wheel).get_all("Requires-Dist") or []
    cpu = [need for need in needs if "extra" not in need or 'extra == "cpu"' in need]
    assert any(need.startswith("torch==") for need in cpu)
    assert not [need for need in cpu if CUDA.match(need) or need.startswith(("vllm", "lmcache"))]
    lock = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    assert not [line for line in lock if CUDA.match(line)]
    pin = re.compile(r"[\w.-]+==[^\s;]+(; (platform_machine|python_version) \S+ \S+)?")
    assert all(pin.fullmatch(line) for line in lock if not line.startswith("#"))


# installed --------------------------------------------------------------------


def test_the_module_paths_that_users_name_are_found_in_the_wheel(python: Path, tmp_path: Path) -> None:
    command = [str(python), "-c", FIND, "continuum_lmcache", *NAMED_BY_USERS]
    paths = subprocess.check_output(command, cwd=tmp_path, env=environment(), text=True).split()
    assert len(paths) == 1 + len(NAMED_BY_USERS)
    assert all(Path(path).is_relative_to(python.parent.parent) for path in paths)


def test_the_installed_commands_work_in_an_empty_folder(python: Path, tmp_path: Path) -> None:
    """init, measure, and the simulator over a trace: from the wheel, with vLLM beside it."""

    def console(*words: str) -> str:
        command = [str(python.with_name("continuum-lmcache")), *words]
        ran = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert "lmcache.json" in console("init", "--disk", "", "--operating")
    assert (tmp_path / "docs" / "grafana" / "continuum.json").is_file()
    assert "--quick" in console("measure", "--help")
    turn = {"input_tokens": 900, "new_tokens": 900, "output_tokens": 9}
    (tmp_path / "my.jsonl").write_text(json.dumps({"program_id": "p", "arrival_s": 0.0, "turns": [turn]}))
    assert "agents finish" in console(
        "estimate", "--trace", "my.jsonl", "--model", "Llama-3.1-8B", "--gpu", "a10"
    )


@pytest.fixture
def server(python: Path, model: Path, tmp_path: Path) -> Iterator[Server]:
    extra = {"lmcache.mp.port": reserved_port(), "lmcache.max_local_cpu_size": 0.1}
    transfer = {
        "kv_connector": "LMCacheConnectorV1",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    port, log = reserved_port(), tmp_path / "server.log"
    command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--served-model-name", "tiny", "--max-model-len", "1024", *CPU_ARGS]
    command += ["--scheduling-policy", "continuum", "--kv-transfer-config", json.dumps(transfer)]
    env = {**environment(), **CPU_ENV, "VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}", process, log, 600.0)
        yield Server(f"http://127.0.0.1:{port}")
    finally:
        stop(process)


@pytest.mark.real
def test_the_installed_wheel_pins_kv_and_reloads_it_from_lmcache_as_vllms_own_prefix_hit_has_it(
    server: Server,
) -> None:
    prompt = ids(2 * CHUNK + 64, 9)
    server.complete(prompt, job_id="p")
    page = HTTP.get(f"{server.url}/metrics").text
    assert 'continuum_programs{engine="0"} 1.0' in page
    assert 'continuum_tier_store_info{engine="0",mode="lmcache-mp"} 1.0' in page
    assert 'continuum_ttl_decisions_total{engine="0"' in page
    own = server.complete(prompt, job_id="p", is_last_step=True)

    def reloaded() -> bool:
        """LMCache stores it some time after."""
        server.usage_becomes(0.0)
        HTTP.post(f"{server.url}/reset_prefix_cache").raise_for_status()
        before = server.metric("continuum_prompt_tokens_total", tier="dram")
        again = server.complete(prompt, job_id="p", is_last_step=True)
        loaded = server.metric("continuum_prompt_tokens_total", tier="dram") - before
        assert loaded < 2 * CHUNK or again.logprobs == own.logprobs
        return loaded == 2 * CHUNK

    wait_for(reloaded, "a load from DRAM", every_s=0.5)
