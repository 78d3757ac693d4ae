"""vLLM's SimpleCPUOffloadConnector on a CPU: its scheduler's side as it is, with copies by torch.

Its worker copies by CUDA's streams and the driver's batched copies, so vLLM cannot run it here. What a
scheduler can get wrong beside it lies in the scheduler's side: which blocks it holds while it stores, which
prompts it finds, when it is done. A copy takes LATE_POLLS steps and reads its blocks at the end, so that a
block that was free too early has another turn's KV by then. Read on vLLM 0.32: SimpleCPUOffloadWorker,
DmaCopyBackend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import simple_cpu_offload_connector
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.v1.simple_kv_offload import worker as simple_worker
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

LATE_POLLS = 2
Caches = dict[str, torch.Tensor]


class Copy:
    """In the place of the CUDA event behind a copy; done at its last poll."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy, self._polls, self._is_done = copy, 0, False

    def query(self) -> bool:
        self._polls += 1
        if self._polls > LATE_POLLS:
            self.synchronize()
        return self._is_done

    def synchronize(self) -> None:
        if not self._is_done:
            self._copy()
        self._is_done = True


class Copies:
    """In the place of DmaCopyBackend."""

    def init(self, gpu: Caches, cpu: Caches, *_: object) -> None:
        self._gpu, self._cpu = gpu, cpu

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[Any],
        wait_event: object = None,  # noqa: ARG002 (a step's KV is written when its call returns)
    ) -> None:
        source, target = (self._gpu, self._cpu) if is_store else (self._cpu, self._gpu)

        def copy() -> None:
            for name, tensor in target.items():
                tensor[dst_blocks] = source[name][src_blocks]

        events_list.append((event_idx, Copy(copy)))

    def shutdown(self) -> None:
        pass


class NoCuda:
    """In the place of torch.cuda's streams and events."""

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def record(self, stream: object) -> None:
        pass


class Worker(SimpleCPUOffloadWorker):
    def register_kv_caches(self, kv_caches: Caches) -> None:
        with (
            patch.object(torch.cuda, "Stream", NoCuda),
            patch.multiple(simple_worker, DmaCopyBackend=Copies, PIN_MEMORY=False),
        ):
            super().register_kv_caches(kv_caches)

    def wait_for_save(self) -> None:
        with patch.object(torch.cuda, "current_stream", NoCuda), patch.object(torch, "Event", NoCuda):
            super().wait_for_save()


class SimpleOnCpuConnector(SimpleCPUOffloadConnector):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with patch.object(simple_cpu_offload_connector, "SimpleCPUOffloadWorker", Worker):
            super().__init__(*args, **kwargs)
