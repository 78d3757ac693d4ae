"""What names KV in LMCache's tiers beside its tokens: a fingerprint of what computes it, and a version.

    model's name    /models/agent-3f0c...: checkpoint, quantization, dtypes, overrides, parallel layout
    salt            the request's own, hashed, since it names files; once the weights of the running engine
                    may have changed, with a number that no other engine has; of an adapter, with its name

LMCache takes the model's path. But KServe mounts every model at one path, and trainers save over a
checkpoint. The fingerprint is of all bytes of the files, since training may change one row. So the scheduler,
all workers, and engines on other machines find the same one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from blake3 import blake3
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from vllm import envs
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import KVCacheConfig

from continuum_lmcache.bounded_dict import BoundedDict

logger = init_logger("vllm.continuum.lmcache")
# of the model, its quantization, its processors of images; and its own code
CONFIGURATION = re.compile(r"(?!tokenizer|generation)(.*config|params|.*quant.*)\.json|.*\.py")
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
SMALL_BYTES = 1 << 20  # of a file that is read at each start
HASH_DIGITS = 64
MOST_ADAPTERS = 10_000  # whose names are remembered
SETTLED_S = 5.0  # a file changed later than this may change again within one tick of its file system's clock
OF_CACHE = ("cache_dtype", "kv_cache_dtype_skip_layers", "mamba_cache_dtype", "mamba_ssm_cache_dtype")
OF_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size")
OF_MODEL = (
    *("revision", "code_revision", "model_weights", "dtype", "quantization", "quantization_config"),
    "config_format",
)


def kv_fingerprint(config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """16 hexadecimal digits of all that decides the bytes of a token's KV, beside the tokens."""
    models = [config.model_config, getattr(config.speculative_config, "draft_model_config", None)]
    began_s = time.monotonic()
    parts = [
        _values(config.cache_config, OF_CACHE),
        # on a CPU a block's bytes are packed together
        [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups],
        _values(config.parallel_config, OF_RANKS),
        *(_of_model(model, config.load_config) for model in models if model is not None),
    ]
    if (took_s := time.monotonic() - began_s) > 1.0:
        logger.info("all bytes of the checkpoint were hashed in %.0f s; the next start remembers it", took_s)
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
    with ThreadPoolExecutor() as threads:
        hashes = list(threads.map(_hash, files))
    return [
        _values(model, OF_MODEL),
        json.dumps(model.hf_overrides, sort_keys=True, default=name),
        model.max_model_len if "longrope" in str(model.hf_config) else 0,  # of which vLLM chooses the factors
        model.seed if load.load_format == "dummy" else 0,
        [(path.name, found) for path, found in zip(files, hashes, strict=True)],
    ]


def _files(name: str, revision: str | None, download_dir: str | None) -> list[Path]:
    """The checkpoint's weights, and what else decides how they compute KV."""
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


def _hash(path: Path) -> str:
    """Of all bytes of the file. Of a large one it is remembered for as long as size, inode and times stay.

    Of a machine's processes the first one reads; the others wait for it.
    """
    with path.open("rb", buffering=0) as file:  # opened first: a file system of a network asks for times then
        about, now_s = os.fstat(file.fileno()), time.time()
        if about.st_size < SMALL_BYTES:
            return _read(file)
        name = hashlib.blake2b(str(path.resolve()).encode(), digest_size=16).hexdigest()
        memory = Path(envs.VLLM_CACHE_ROOT) / "continuum_lmcache" / name
        try:
            memory.parent.mkdir(parents=True, exist_ok=True)
            entry = os.fdopen(os.open(memory, os.O_RDWR | os.O_CREAT, 0o600), "r+")
            fcntl.flock(entry, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("each process reads the checkpoint, since %s keeps no hash (%s)", memory, error)
            return _read(file)
        with entry:
            state = f"{about.st_size} {about.st_ino} {about.st_mtime_ns} {about.st_ctime_ns} "
            known = entry.read()
            if known.startswith(state) and len(known) == len(state) + HASH_DIGITS:
                return known.removeprefix(state)
            found = _read(file)
            if max(about.st_mtime, about.st_ctime) < now_s - SETTLED_S:
                entry.seek(0)
                entry.truncate()
                entry.write(state + found)
            return found


def _read(file: FileIO) -> str:
    hasher: Any = blake3
    return hashlib.file_digest(file, hasher).hexdigest()


class WeightsVersion:
    """Names the KV of one engine's weights since they last changed, which no other engine has."""

    def __init__(self) -> None:
        self.number = b""  # random; empty: the checkpoint's weights, which engines may share

    def renew(self) -> None:
        logger.debug("KV that LMCache's tiers hold counts as other weights' from now on")
        self.number = secrets.token_bytes(16)

    def salt(self, salt: str, adapter: bytes = b"") -> str:
        """The salt that LMCache is told in place of a request's own; "" while there is none to hide.

        `adapter`: the name of its adapter's KV, at most 16 bytes; b"": none.
        """
        if not (salt or self.number or adapter):
            return ""
        digest = hashlib.blake2b(salt.encode(), key=self.number, person=adapter, digest_size=16)
        return digest.hexdigest()


class AdapterNames:
    """Names the KV of LoRA adapters by all bytes of their files and by vLLM's id of this load: what is loaded
    again under a name is another adapter. One without files on this machine has a name that no other engine
    has."""

    def __init__(self) -> None:
        self._names: BoundedDict[tuple[str, int], bytes] = BoundedDict(MOST_ADAPTERS)

    def of(self, adapter: LoRARequest | None) -> bytes:
        """16 bytes; b"" for the model itself. The files are read once a load, as it begins."""
        if adapter is None:
            return b""
        key = adapter.lora_path, adapter.lora_int_id
        if key not in self._names:
            try:
                found = [(path.name, _hash(path)) for path in _files(adapter.lora_path, None, None)]
            except OSError:
                found = []
            about = repr([adapter.lora_int_id, found]).encode() if found else secrets.token_bytes(16)
            self._names[key] = hashlib.blake2b(about, digest_size=16).digest()
        return self._names[key]
