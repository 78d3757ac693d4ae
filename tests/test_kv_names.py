"""What names KV in LMCache's tiers changes with all that computes it (connectors.kv_names.py)."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache")

import torch
from safetensors.torch import load_file, save_file
from vllm.config import LoadConfig
from vllm.lora.request import LoRARequest

from connectors import kv_names
from connectors.kv_names import AdapterNames, WeightsVersion, kv_fingerprint

PATH = "model.safetensors"


class Deployment:
    """The parts of vLLM's configuration that the fingerprint reads; a test changes one."""

    def __init__(self, folder: Path) -> None:
        self.model = SimpleNamespace(
            model=str(folder),
            hf_config_path=None,
            revision=None,
            code_revision=None,
            model_weights="",
            dtype=torch.bfloat16,
            quantization=None,
            quantization_config=None,
            config_format="auto",
            hf_overrides={},
            hf_config={},
            max_model_len=4096,
            seed=0,
        )
        self.load, self.block_tokens = LoadConfig(), 16
        self.cache = SimpleNamespace(
            cache_dtype="auto",
            kv_cache_dtype_skip_layers=[],
            mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype="auto",
        )
        self.ranks = SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1
        )
        self.draft: Any = None

    def fingerprint(self) -> str:
        config: Any = SimpleNamespace(
            model_config=self.model,
            load_config=self.load,
            cache_config=self.cache,
            parallel_config=self.ranks,
            speculative_config=SimpleNamespace(draft_model_config=self.draft) if self.draft else None,
        )
        spec = SimpleNamespace(block_size=self.block_tokens)
        caches: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        return kv_fingerprint(config, caches)


@pytest.fixture
def here(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    shutil.copytree(model, tmp_path / "latest")
    return Deployment(tmp_path / "latest")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of each file that is read as a whole, in order."""
    read, sizes = kv_names._read, list[int]()

    def counted(file: Any) -> str:
        sizes.append(os.fstat(file.fileno()).st_size)
        return read(file)

    monkeypatch.setattr(kv_names, "_read", counted)
    return sizes


def halve(tensors: dict[str, torch.Tensor], name: str, first: int = 0, last: int | None = None) -> None:
    tensors[name].view(-1)[first:last] *= 0.5


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: halve(tensors, "model.layers.3.self_attn.k_proj.weight"),
        lambda tensors: halve(tensors, "model.layers.7.input_layernorm.weight", 300, 301),
        lambda tensors: halve(tensors, "model.embed_tokens.weight", 1001 * 512, 1002 * 512),
        lambda tensors: tensors.pop("model.norm.weight"),
        lambda tensors: tensors.update(
            {"model.norm.weight": tensors["lm_head.weight"], "lm_head.weight": tensors["model.norm.weight"]}
        ),
    ],
    ids=["a matrix", "one value of a norm", "a row of the embedding", "a tensor less", "two exchanged"],
)
def test_another_checkpoint_in_the_same_folder_has_another_name(
    here: Deployment, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    before, file = here.fingerprint(), Path(here.model.model) / PATH
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    assert here.fingerprint() != before


def elsewhere(it: Deployment, **values: Any) -> str:
    """A folder that has a configuration alone, for vLLM's --hf-config-path."""
    folder = Path(it.model.model).with_name("configuration")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda it: vars(it.cache).update(cache_dtype="fp8_e4m3"),
        lambda it: vars(it.cache).update(kv_cache_dtype_skip_layers=["0"]),
        lambda it: vars(it).update(block_tokens=32),
        lambda it: vars(it.ranks).update(tensor_parallel_size=2),
        lambda it: vars(it.ranks).update(pipeline_parallel_size=2),
        lambda it: vars(it.ranks).update(decode_context_parallel_size=2),
        lambda it: vars(it).update(load=LoadConfig(load_format="dummy")),
        lambda it: vars(it).update(draft=it.model),
        lambda it: vars(it.model).update(dtype=torch.float16),
        lambda it: vars(it.model).update(quantization="fp8"),
        lambda it: vars(it.model).update(quantization_config={"linear_scheme": "fp8_per_block"}),
        lambda it: vars(it.model).update(revision="v2"),
        lambda it: vars(it.model).update(hf_overrides={"rope_parameters": {"rope_theta": 1e6}}),
        lambda it: vars(it.model).update(hf_overrides=halve),
        lambda it: (Path(it.model.model) / "config.json").write_text(json.dumps({"rope_theta": 1})),
        lambda it: (Path(it.model.model) / "hf_quant_config.json").write_text("{}"),
        lambda it: (Path(it.model.model) / "params.json").write_text(json.dumps({"rope_theta": 1})),
        lambda it: (Path(it.model.model) / "modeling_own.py").touch(),
        lambda it: vars(it.model).update(code_revision="v2"),
        lambda it: (Path(it.model.model) / "preprocessor_config.json").write_text('{"image_mean": [0]}'),
        lambda it: (Path(it.model.model) / "video_preprocessor_config.json").write_text("{}"),
        lambda it: (Path(it.model.model) / "image_processing_own.py").touch(),
        lambda it: vars(it.model).update(hf_config_path=elsewhere(it, rope_theta=1)),
    ],
)
def test_whatever_else_changes_the_bytes_of_kv_changes_the_name(
    here: Deployment, change: Callable[[Deployment], Any]
) -> None:
    before = here.fingerprint()
    change(here)
    assert here.fingerprint() != before


def test_the_same_files_elsewhere_have_the_same_fingerprint(here: Deployment, tmp_path: Path) -> None:
    """Other machines' copies have other paths and times. A tokenizer computes no KV, nor do other files."""
    copied = tmp_path / "elsewhere"
    shutil.copytree(here.model.model, copied, copy_function=shutil.copyfile)
    (copied / "README.md").touch()
    (copied / "tokenizer.json").unlink()
    (copied / "tokenizer_config.json").write_text("{}")
    (copied / "generation_config.json").write_text("{}")
    (copied / "checkpoint-100").mkdir()
    assert Deployment(copied).fingerprint() == here.fingerprint()


def test_a_long_context_model_is_named_with_its_longest_prompt(here: Deployment) -> None:
    """vLLM chooses between its two lists of rope factors by max_model_len."""
    before = here.fingerprint()
    here.model.max_model_len = 8192
    assert here.fingerprint() == before
    here.model.hf_config = {"rope_parameters": {"rope_type": "longrope"}}
    after = here.fingerprint()
    here.model.max_model_len = 4096
    assert here.fingerprint() != after


@pytest.mark.parametrize("suffix", [".bin", ".gguf", ".safetensors"])
def test_one_byte_of_a_file_that_lists_no_tensors_is_seen(
    here: Deployment, tmp_path: Path, suffix: str
) -> None:
    """Also in a broken one, which vLLM refuses with its own words."""
    file = tmp_path / f"other{suffix}"
    content = bytearray(range(256)) * 40_000
    here.model.model = str(file)
    found = set()
    for at in (0, 5_000_001, len(content) - 1):
        content[at] ^= 1
        file.write_bytes(content)
        found.add(here.fingerprint())
    assert len(found) == 3


def test_a_machine_reads_a_checkpoint_once(
    here: Deployment, monkeypatch: pytest.MonkeyPatch, reads: list[int]
) -> None:
    """All processes of a start, and later starts; but what may change again within a tick of the clock."""
    file = Path(here.model.model) / PATH
    new = here.fingerprint()
    assert here.fingerprint() == new and reads.count(file.stat().st_size) == 2
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 60)
    reads.clear()
    starts = [threading.Thread(target=here.fingerprint) for _ in range(4)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert here.fingerprint() == new and reads.count(file.stat().st_size) == 1


def test_a_change_that_keeps_size_and_time_is_seen(here: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `touch -r`, rsync and tar set them: the time of a file's last change of state cannot be set."""
    file, clock = Path(here.model.model) / PATH, time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 60)
    before, about = here.fingerprint(), file.stat()
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"\x7f")
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert file.stat().st_size == about.st_size and file.stat().st_mtime_ns == about.st_mtime_ns
    assert here.fingerprint() != before


@pytest.mark.parametrize("memory", ["", "9 9 9 9 abc"])
def test_a_broken_memory_of_hashes_is_read_over(
    here: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[int], memory: str
) -> None:
    """Of an engine that was killed while it wrote."""
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 60)
    right = here.fingerprint()
    (entry,) = (tmp_path / "cache" / "continuum_lmcache").iterdir()
    whole = entry.read_text()
    for broken in (memory, whole[:-1]):
        entry.write_text(broken)
        reads.clear()
        assert here.fingerprint() == right and len(reads) == 2 and entry.read_text() == whole


def test_without_a_place_for_hashes_each_process_reads_and_says_so(
    here: Deployment, tmp_path: Path, logged: Any, reads: list[int]
) -> None:
    right, warned = here.fingerprint(), logged(kv_names)
    (tmp_path / "cache").rename(tmp_path / "gone")
    (tmp_path / "cache").touch()
    reads.clear()
    assert here.fingerprint() == right and len(reads) == 2
    assert "each process reads the checkpoint" in warned[0]


def test_weights_that_are_no_files_here_are_named_by_their_path_and_get_a_warning(
    here: Deployment, monkeypatch: pytest.MonkeyPatch, logged: Any
) -> None:
    warned = logged(kv_names)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("nobody/nothing", "s3://bucket/a model"):
        here.model.model = name
        assert here.fingerprint()
    assert len(warned) == 2 and "nobody/nothing" in warned[0]


def test_a_version_hides_what_was_stored_under_every_salt() -> None:
    """And no other engine's version is the same. Engines share what they stored before, also of a salt."""
    one, other = WeightsVersion(), WeightsVersion()
    assert one.salt("tenant") == other.salt("tenant") and one.salt("") == ""
    seen = {"", "tenant", one.salt("tenant")}
    for version in (one, one, other):
        version.renew()
        seen |= {version.salt(""), version.salt("tenant")}
    assert len(seen) == 9 and all(len(salt) <= 128 for salt in seen)


def test_a_salt_is_never_told_to_lmcache_which_names_its_files_by_it() -> None:
    """vLLM's advice is that a salt is a secret."""
    version = WeightsVersion()
    assert "SECRET" not in version.salt("SECRET") and version.salt("SECRET") != version.salt("SECRET2")


# adapters --------------------------------------------------------------------


def adapter(folder: Path, number: int = 1, name: str = "a") -> LoRARequest:
    return LoRARequest(name, number, str(folder))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of an adapter."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    found = tmp_path / "adapter"
    found.mkdir()
    save_file({"lora_A": torch.ones(8, 8)}, found / "adapter_model.safetensors")
    (found / "adapter_config.json").write_text('{"r": 8}')
    return found


def test_an_adapter_keeps_its_name_over_a_restart_and_has_one_on_each_engine(folder: Path) -> None:
    first = AdapterNames().of(adapter(folder))
    assert len(first) == 16 and AdapterNames().of(adapter(folder)) == first
    assert AdapterNames().of(None) == b""


def test_other_bytes_and_another_load_are_another_adapter(folder: Path) -> None:
    names = AdapterNames()
    found = {names.of(adapter(folder)), names.of(adapter(folder, number=2))}
    save_file({"lora_A": torch.zeros(8, 8)}, folder / "adapter_model.safetensors")
    assert names.of(adapter(folder)) in found, "the load has the files as they were"
    found |= {AdapterNames().of(adapter(folder))}
    (folder / "adapter_config.json").write_text('{"r": 4}')
    found |= {AdapterNames().of(adapter(folder))}
    assert len(found) == 4


def test_an_adapter_without_files_here_is_never_another_engines(tmp_path: Path) -> None:
    one, other = AdapterNames(), AdapterNames()
    missing = adapter(tmp_path / "none")
    assert one.of(missing) == one.of(missing) != other.of(missing)


def test_no_salt_of_a_client_is_an_adapters(folder: Path) -> None:
    version, name = WeightsVersion(), AdapterNames().of(adapter(folder))
    salts = {version.salt(""), version.salt("t"), version.salt("", name), version.salt("t", name)}
    assert len(salts) == 4 and version.salt("") == ""
    assert not salts & {version.salt(salt) for salt in (name.hex(), version.salt("", name), f"{name.hex()}t")}
