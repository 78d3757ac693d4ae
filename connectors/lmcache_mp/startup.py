"""The MP connector's start: apply defaults, connect to the server's tier module, log warnings."""

from __future__ import annotations

import os
import time
from importlib import metadata
from typing import Any

import grpc
import msgspec
import zmq
from lmcache.integration.vllm.lmcache_mp_connector import _iter_kv_cache_specs
from lmcache.integration.vllm.utils import calculate_draft_layers, mla_enabled
from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest, ServerModuleCallResponse
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.torch_utils import get_kv_cache_torch_dtype
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    RSWASpec,
    SlidingWindowSpec,
)

from connectors.lmcache_mp.settings import with_defaults
from connectors.lmcache_mp.tier_mirror import Call, TierPoller
from connectors.lmcache_mp.tracker import Window
from connectors.lmcache_mp.translation import EngineShape, misspelt, translated
from connectors.lmcache_mp.wire import METHOD, MODULE, ChangesReply
from connectors.transfer_config import transfer_config
from continuum_lmcache import __version__
from continuum_lmcache.connector_names import IN_PROCESS, MP_PREFIX
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.model_shapes import shape

logger = init_logger("vllm.continuum.lmcache")
# what LMCache 0.5.6's clients raise beside OSError. ZMQ: errors of its socket, a reply to another request
# (mq.py:430); gRPC: of the call (client.py:172), a closed channel, an unreadable reply (proto_codec.py)
CALL_ERRORS = (
    zmq.ZMQError,
    grpc.RpcError,
    grpc.FutureCancelledError,
    msgspec.MsgspecError,
    ValueError,
    TypeError,
)
FIRST_ANSWER_S = 30.0
LOST_S = 300.0  # a request without an answer for so long counts as lost
MP_TRANSFER_MODE = MP_PREFIX + "mp_transfer_mode"
LMCACHE_VERSION = metadata.version("lmcache")


def kv_bytes_of_rank(vllm_config: VllmConfig) -> int:
    """KV bytes of a token on one rank by the model's shape, before the KV cache is laid out.

    The shape lacks an indexer's layers, and the scales in `fp8_ds_mla` (DeepSeek V3.2).
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    layers = model.get_num_layers(parallel) + calculate_draft_layers(vllm_config)
    values = (1 if mla_enabled(model) else 2) * model.get_num_kv_heads(parallel) * model.get_head_size()
    dtype = get_kv_cache_torch_dtype(vllm_config.cache_config.cache_dtype, model.dtype)
    return int(layers * values * dtype.itemsize)


def translate(vllm_config: VllmConfig, log: bool) -> None:
    """Put the user's LMCache settings where LMCache's launcher reads them. Raises ConfigError."""
    transfer = transfer_config(vllm_config)
    kv_bytes, block_tokens = kv_bytes_of_rank(vllm_config), vllm_config.cache_config.block_size
    ranks = 1 if mla_enabled(vllm_config.model_config) else vllm_config.parallel_config.world_size
    shape = EngineShape(ranks, block_tokens, kv_bytes * ranks, vllm_config.model_config.max_model_len)
    transfer.kv_connector_extra_config, line = translated(
        transfer.kv_connector_extra_config, os.environ, shape
    )
    if log:
        for sentence in misspelt(os.environ):
            logger.warning(sentence)
        if line:
            logger.info(line)


def apply_defaults(vllm_config: VllmConfig, log: bool) -> None:
    """Put our defaults where LMCache and vLLM read them. Every process does so, with the same result."""
    transfer = transfer_config(vllm_config)
    extra, ours = with_defaults(transfer.kv_connector_extra_config)
    transfer.kv_connector_extra_config = extra
    transfer.kv_load_failure_policy = "recompute"
    if log:
        listed = ", ".join(f"{name}={value}" for name, value in ours.items())
        logger.info("LMCache MP defaults: kv_load_failure_policy=recompute, %s", listed)


def caller(client: Any) -> Call:
    """Exchanges with the server's tier module, over one of LMCache's own clients. Raises OSError.

    One at a time: after a timeout the next call waits for the same answer. What a full socket does not take
    fails: LMCache's thread would wait there, and an engine that stops would wait for the thread.

    Used of the ZMQ client, as of LMCache 0.5.6: `_message_queue_client.socket`, and `.cancel_streams`, which
    its thread calls when the connection is closed.
    """
    sent: list[tuple[float, Any]] = []  # the request without an answer

    if queue := getattr(client, "_message_queue_client", None):  # else gRPC
        cancel_streams = queue.cancel_streams

        def connection_closed() -> None:
            sent.clear()
            cancel_streams()

        queue.cancel_streams = connection_closed
        queue.socket.setsockopt(zmq.SNDTIMEO, 0)

    def call(payload: bytes, timeout_s: float) -> bytes:
        now_s = time.monotonic()
        try:
            request = next((future for at_s, future in sent[:] if now_s - at_s < LOST_S), None)
            if request is None:
                request = client.server_module_call(ServerModuleCallRequest(METHOD, payload))
                sent[:] = [(now_s, request)]
            response = request.result(timeout=timeout_s)
            sent.clear()
        except CALL_ERRORS as error:
            sent.clear()
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        if not isinstance(response, ServerModuleCallResponse):
            raise ConnectionError(f"its reply is {response!r}")
        if not response.success:
            raise ConnectionError(response.error)
        return bytes(response.payload)

    return call


def check_layers(vllm_config: VllmConfig, log: bool) -> None:
    """Raise ConfigError for layers that LMCache 0.5.6 refuses on a CPU once the model is loaded; windows only
    where the worker copies KV itself. Warn of those that nobody has tried on a GPU (docs/models.md).
    """
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return  # then windows are kept like full attention
    try:
        config = vllm_config.model_config.hf_text_config.to_dict()
        found = shape(config, "the model's config", weights=(0.0, ""))
    except ConfigError:  # keys that we do not know
        return
    what, extra = found.special_layers, transfer_config(vllm_config).kv_connector_extra_config
    has_windows_alone = found.kv_heads > 0 and not found.state_layers
    server_copies = has_windows_alone and extra.get(MP_TRANSFER_MODE) == "lmcache_driven"
    if what and current_platform.is_cpu() and not server_copies:
        raise ConfigError(
            f"LMCache 0.5.6 refuses {what} on a CPU; leave the KV connector out, or name {IN_PROCESS}, with "
            "which vLLM keeps windows like full attention"
        )
    if what and log:
        logger.warning("nobody has tried %s over LMCache's server on a GPU with this project", what)


def windows_of(kv_cache_config: KVCacheConfig) -> set[Window]:
    """The windows of layers that have some. Raises ConfigError for layers of which vLLM gives back other
    blocks than those before a window: LMCache 0.5.6 stores what others have written there since
    (LMCache/LMCache#5001).
    """
    specs = list(_iter_kv_cache_specs(kv_cache_config))
    for spec in specs:
        if isinstance(spec, ChunkedLocalAttentionSpec | RSWASpec):
            raise ConfigError(
                f"LMCache 0.5.6 may store wrong KV of layers with {type(spec).__name__}; leave the KV "
                "connector out"
            )
    kept = (spec for spec in specs if isinstance(spec, SlidingWindowSpec))
    return {Window(spec.sliding_window, spec.block_size) for spec in kept}


def first_answer(poller: TierPoller) -> ChangesReply:
    """The server's first answer, at the start, where a wait is acceptable. Raises ConfigError."""
    try:
        return poller.poll(FIRST_ANSWER_S)
    except OSError as error:
        raise ConfigError(
            f"LMCache's MP server does not report where KV is ({error}); start it with "
            f'--server-module \'{{"module_path": "{MODULE}"}}\' and this package on its path'
        ) from error


def warn_of_versions(reply: ChangesReply) -> None:
    """Client and server use a wire format of LMCache's own, which no release promises to keep."""
    text = (
        "LMCache's MP server runs %s %s, vLLM %s: install the same release on both sides; else loads and "
        "stores may fail, and prompts are computed"
    )
    if reply.lmcache != LMCACHE_VERSION:
        logger.warning(text, "lmcache", reply.lmcache, LMCACHE_VERSION)
    if reply.continuum != __version__:
        logger.warning(text, "continuum-lmcache", reply.continuum, __version__)


def warn_of_small_l1(spare_tokens: int, max_model_len: int) -> None:
    """A load from L2 needs free L1 for all of it at once; LMCache evicts nothing for it."""
    if spare_tokens < max_model_len:
        logger.warning(
            "LMCache's L1 keeps %d tokens free, and a prompt may have %d: longer prompts may not load from "
            "L2, so L2 does not count as room for programs; give the server more --l1-size-gb or a lower "
            "--eviction-trigger-watermark",
            spare_tokens,
            max_model_len,
        )
