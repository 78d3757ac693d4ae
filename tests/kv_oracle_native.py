"""vLLM's own offloading on the oracle's GPU: only the copies are made by a stand-in, which moves names of KV.

vLLM refuses to copy where the device is a CPU. Each copy is made as late as vLLM allows: when it is reported,
or flushed. Every answer of `locate` is compared with what lies in the CPU's memory, and every load with the
answer before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from bench import BLOCK
from kv_oracle import OracleBench, keys
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult, make_offload_key
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from continuum_lmcache.reload.tier_store import Prefix, TierHit

CHUNK = 32  # tokens; two blocks
CHUNKS = 20  # that the CPU has room for
BYTES_PER_TOKEN = 8  # of the bench's one layer


class NameMover(OffloadingWorker):
    """vLLM's worker of the copies. `chunks` is the CPU's memory, `slots` the GPU's.

    A copy ends `lag` reports after it was submitted, in the order of submission.
    """

    def __init__(self, slots: Any, blocks_per_chunk: int) -> None:
        self.slots, self.blocks_per_chunk = slots, blocks_per_chunk
        self.chunks: dict[int, list[Any]] = {}  # blocks of names, by the chunk's place
        self.loads = self.lost = self.losing = self.lag = 0
        self.evict: Callable[[int], None]
        self._reports = 0
        self._under_way: deque[tuple[int, int, Callable[[], None], int]] = deque()
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        return self._submit(job_id, src_spec, dst_spec, self._store)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec, **_: Any) -> bool:
        self.loads += 1
        return self._submit(job_id, dst_spec, src_spec, self._load)

    def get_finished(self) -> list[TransferResult]:
        self._reports += 1
        while self._under_way and self._under_way[0][0] <= self._reports:
            self._end_first()
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        while any(job_id in job_ids for _, job_id, _, _ in self._under_way):
            self._end_first()

    def _submit(self, job_id: int, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec, copy: Any) -> bool:
        (first,), whole = gpu.block_indices, self.blocks_per_chunk
        places = [(chunk, part) for chunk in cpu.block_ids.tolist() for part in range(whole)]
        pairs = list(zip(gpu.block_ids.tolist(), places[first % whole :], strict=True))
        move = lambda: [copy(*pair) for pair in pairs]  # noqa: E731
        self._under_way.append((self._reports + self.lag, job_id, move, len(pairs)))
        return True

    def _store(self, block: int, place: tuple[int, int]) -> None:
        chunk, part = place
        held = self.chunks.setdefault(chunk, [None] * self.blocks_per_chunk)
        held[part] = list(self.slots[block * BLOCK : (block + 1) * BLOCK])

    def _load(self, block: int, place: tuple[int, int]) -> None:
        self.slots[block * BLOCK : (block + 1) * BLOCK] = self.chunks[place[0]][place[1]]

    def _end_first(self) -> None:
        _, job_id, move, blocks = self._under_way.popleft()
        move()
        self._ended.append(TransferResult(job_id, True, blocks * BLOCK * BYTES_PER_TOKEN, 1e-3))


class NativeBench(OracleBench):
    """The oracle with vLLM's own offloading. `settings` are its own."""

    connector, module = "ContinuumOffloadingConnector", "connectors.native.connector"

    def __init__(
        self, *args: Any, chunk: int = CHUNK, chunks: int = CHUNKS, settings: Any = None, **more: Any
    ) -> None:
        self.chunk, blocks = chunk, chunk // BLOCK
        page = CPUOffloadingSpec.BLOCK_SIZE_ALIGNMENT
        size = -(-chunk * BYTES_PER_TOKEN // page) * page
        self.settings = {
            "cpu_bytes_to_use": chunks * size,
            "blocks_per_chunk": blocks,
            "offload_prompt_only": False,
            **(settings or {}),
        }
        self.compared = self.loaded_tokens = 0  # answers of `locate`; tokens of all loads
        super().__init__(*args, **more)

    def join(self) -> Any:
        scheduler, connector = self.scheduler, self.scheduler.connector
        worker = type(connector)(scheduler.vllm_config, KVConnectorRole.WORKER, scheduler.kv_cache_config)
        self.lmcache = worker.connector_worker.worker = NameMover(self.slots, self.chunk // BLOCK)
        self.lmcache.evict = lambda _: connector.reset_cache()
        if hasattr(connector, "locate"):
            self._locate, connector.locate = connector.locate, self._compared
            self._place, connector.update_state_after_alloc = connector.update_state_after_alloc, self._placed
        return worker

    def spoilt(self) -> list[str]:
        """Chunks that a live request would find with other KV than its own."""
        found = []
        for request in self.scheduler.requests.values():
            if request.request_id in self._has_both:
                continue
            right, ends = self._up_to(request).keys, range(self.chunk, request.num_tokens + 1, self.chunk)
            for end in ends:
                key = make_offload_key(request.block_hashes[end // BLOCK - 1], 0)
                if not self._is_right(key, right[end - self.chunk : end]):
                    found.append(f"tokens [{end - self.chunk}, {end}) of {request.request_id}")
        return found

    def _compared(self, prefix: Prefix) -> TierHit:
        """`locate`, compared with the CPU's memory."""
        held = self._locate(prefix)
        self.compared += 1
        adapter = prefix.adapter.lora_int_id if isinstance(prefix.adapter, LoRARequest) else 0
        names, manager = keys(list(prefix.token_ids), self.worker.weights, adapter), self._manager
        for number, key in enumerate(self.scheduler.connector._keys(prefix)):
            start = number * self.chunk
            if start >= held.dram_tokens:
                assert start > held.dram_tokens or manager._policy.get(key) is None, "it holds more"
                break
            assert manager._policy.get(key) is not None, "it holds less"
            assert self._is_right(key, names[start : start + self.chunk]), "it holds other KV"
        return held

    def _placed(self, request: Any, blocks: Any, loaded: int) -> None:
        """A load brings what `locate` says of the prompt at that moment; or more, if the GPU has what is not
        there."""
        self.loaded_tokens += loaded
        if loaded:
            said = self._locate(Prefix(request.all_token_ids, request.block_hashes)).dram_tokens
            status = self.scheduler.connector.connector_scheduler._req_status[request.request_id]
            gpu_tokens = status.num_locally_computed_tokens
            assert said == gpu_tokens + loaded or said < gpu_tokens
        self._place(request, blocks, loaded)

    @property
    def _manager(self) -> Any:
        return self.scheduler.connector.connector_scheduler.manager

    def _is_right(self, key: Any, names: list[int]) -> bool:
        """Whether the CPU's chunk of this name has this KV, or none yet."""
        held = self._manager._policy.get(key)
        if held is None or not held.is_ready:
            return True
        return [name for block in self.lmcache.chunks[held.chunk_id] for name in block] == names


class StockNativeBench(NativeBench):
    """vLLM's own connector."""

    connector, module = "OffloadingConnector", None  # type: ignore[assignment]
