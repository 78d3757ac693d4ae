"""What names KV in LMCache's tiers beside its tokens: a fingerprint of what computes it, and a version.

    model's name    /models/agent-3f0c...: checkpoint, quantization, dtypes, overrides, parallel layout
    salt            the request's own, until the weights of the running engine may have changed; then
                    its hash with a number that no other engine has

LMCache takes the model's path. But KServe mounts every model at one path, and trainers save over a
checkpoint. The fingerprint is of files, so the scheduler and all workers find the same one. A sample of each
tensor is enough: training changes nearly all tensors, and many values of each.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import secrets
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.continuum.lmcache")
CONFIGURATION = re.compile(r"(config|params|.*quant.*)\.json|(configuration|modeling)_.*\.py")
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
PIECES, PIECE_BYTES = 8, 1024  # of each tensor
PARTS = 1024  # of a file that does not list its tensors
OF_CACHE = ("cache_dtype", "kv_cache_dtype_skip_layers", "mamba_cache_dtype", "mamba_ssm_cache_dtype")
OF_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size")
OF_MODEL = ("revision", "model_weights", "dtype", "quantization", "quantization_config", "config_format")


def kv_fingerprint(config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """16 hexadecimal digits of all that decides the bytes of a token's KV, beside the tokens."""
    models = [config.model_config, getattr(config.speculative_config, "draft_model_config", None)]
    parts = [
        _values(config.cache_config, OF_CACHE),
        # on a CPU a block's bytes are packed together
        [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups],
        _values(config.parallel_config, OF_RANKS),
        *(_of_model(model, config.load_config) for model in models if model is not None),
    ]
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def _values(config: Any, names: tuple[str, ...]) -> list[str]:
    return [str(getattr(config, name)) for name in names]


def _of_model(model: ModelConfig, load: LoadConfig) -> list[Any]:
    files = _files(model.model, model.revision, load.download_dir)
    if load.load_format == "dummy":
        files = [path for path in files if path.suffix not in WEIGHTS]
    elif not any(path.suffix in WEIGHTS for path in files):
        logger.warning(
            "the weights of %s are no files on this machine: that name alone names their KV in LMCache's "
            "tiers, so do not give it to other weights (docs/weight-updates.md)",
            model.model,
        )
    if model.hf_config_path:
        others = _files(model.hf_config_path, model.revision, load.download_dir)
        files += [path for path in others if path.suffix not in WEIGHTS]
    name = lambda overrides: getattr(overrides, "__qualname__", "")  # noqa: E731
    return [
        _values(model, OF_MODEL),
        json.dumps(model.hf_overrides, sort_keys=True, default=name),
        model.max_model_len if "longrope" in str(model.hf_config) else 0,  # of which vLLM chooses the factors
        model.seed if load.load_format == "dummy" else 0,
        [(path.name, _sample(path)) for path in files],
    ]


def _files(name: str, revision: str | None, download_dir: str | None) -> list[Path]:
    """The checkpoint's weights, the configuration of the model and of its quantization, and its own code."""
    place = Path(name)
    if place.is_file():
        return [place]
    if not place.is_dir():
        download = partial(snapshot_download, cache_dir=download_dir, local_files_only=True)
        try:
            place = Path(download(name, revision=revision))
        except (LocalEntryNotFoundError, HFValidationError):
            return []
    files = (path for path in sorted(place.iterdir()) if path.is_file())
    return [path for path in files if path.suffix in WEIGHTS or CONFIGURATION.fullmatch(path.name)]


def _sample(path: Path) -> str:
    """A hash of a safetensors file's list of tensors and a sample of each; of another file, of its parts."""
    size_bytes = path.stat().st_size
    digest = hashlib.blake2b(str(size_bytes).encode(), digest_size=16)
    with path.open("rb") as file:
        start, spans = 8 + int.from_bytes(file.read(8), "little"), []
        if path.suffix == ".safetensors" and 8 < start <= size_bytes:
            head = file.read(start - 8)
            digest.update(head)
            spans = [tensor.get("data_offsets", [0, 0]) for tensor in json.loads(head).values()]
        else:
            start, edges = 0, [size_bytes * part // PARTS for part in range(PARTS + 1)]
            spans = list(itertools.pairwise(edges))
        for first, last in sorted(spans):
            for at in range(first, last, max(PIECE_BYTES, (last - first) // PIECES)):
                file.seek(start + at)
                digest.update(file.read(min(PIECE_BYTES, last - at)))
    return digest.hexdigest()


class WeightsVersion:
    """Names the KV of one engine's weights since they last changed, which no other engine has."""

    def __init__(self) -> None:
        self.number = b""  # random; empty: the checkpoint's weights, which engines may share

    def renew(self) -> None:
        """The weights may be others from now on."""
        logger.debug("KV that LMCache's tiers hold counts as other weights' from now on")
        self.number = secrets.token_bytes(16)

    def salt(self, salt: str) -> str:
        """The salt that LMCache is told in place of a request's own."""
        if not self.number:
            return salt
        return hashlib.blake2b(salt.encode(), key=self.number, digest_size=16).hexdigest()
