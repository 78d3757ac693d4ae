"""How long a step of the model takes: a roofline with a fixed cost, from a machine's numbers.

    step = fixed + per request + max(weights, linear layers) + prefill attention + decode's KV reads

    weights            bytes / memory rate
    linear layers      2 * parameters * (tokens + c0) / FLOP rate: n tokens reach n / (n + c0) of it
    prefill attention  4 * layers * hidden * (n * context + n^2 / 2) / attention's FLOP rate
    decode             bytes of the KV it attends to / memory rate

The shape and the built-in numbers are assumptions that were checked against published tables, not on
a GPU: `measured` is false, and every result carries it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from continuum_lmcache.errors import ProfileError


@dataclass(frozen=True, slots=True)
class Model:
    """What of a model costs time and memory."""

    name: str
    parameters: float
    layers: int
    hidden: int  # query heads * head size
    kv_heads: int
    head_size: int
    dtype_bytes: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_size * self.dtype_bytes

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.dtype_bytes


STEP_SIZES = (0, 128, 256, 512, 2048, 8192)  # tokens of a chunk; 0: decodes alone
LLAMA_8B = Model("Llama-3.1-8B", 8.03e9, layers=32, hidden=4096, kv_heads=8, head_size=128)


@dataclass(frozen=True, slots=True)
class Machine:
    """One accelerator with its host link, as fast as programs get it to go."""

    name: str
    linear_flops: float  # a second, in the linear layers
    attention_flops: float  # a second, in prefill attention
    memory_bytes_per_s: float
    kv_tokens: int  # what its KV cache holds of LLAMA_8B
    link_gbps: float  # host to device, 10^9 bytes/s
    step_s: float = 0.004  # fixed
    request_s: float = 0.0  # for each request in the batch
    chunk_c0: float = 0.0  # tokens at which the linear layers reach half their rate
    measured: bool = False
    source: str = ""

    @classmethod
    def from_mapping(cls, profile: Mapping[str, Any], where: str = "profile") -> Machine:
        """From a profile that was read at the edge. Raises ProfileError for a bad or unknown key."""
        known = {f.name: f for f in fields(cls)}
        needed = [f.name for f in known.values() if f.default is MISSING]
        for key, value in profile.items():
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ProfileError(f"{where}: unknown key {key!r}; {hint}Known: {', '.join(known)}")
            if not _fits(value, str(known[key].type)):
                raise ProfileError(
                    f"{where}: {key} is {value!r}; it must be {EXPECTED[str(known[key].type)]}"
                )
        if missing := [name for name in needed if name not in profile]:
            raise ProfileError(f"{where} has no {missing[0]!r}; the lab needs {', '.join(needed)}")
        return cls(**profile)

    def seconds(self, model: Model, batch: Iterable[tuple[int, int]]) -> float:
        """One step over `batch`: for each request its new tokens, and the tokens before those."""
        tokens = pairs = read_tokens = requests = 0.0
        for new, context in batch:
            requests += 1
            tokens += new
            if new == 1:
                read_tokens += context
            else:
                pairs += new * context + new * new / 2
        if not requests:
            return 0.0
        linear_s = 2 * model.parameters * (tokens + self.chunk_c0) / self.linear_flops
        weights_s = model.weight_bytes / self.memory_bytes_per_s
        attention_s = 4 * model.layers * model.hidden * pairs / self.attention_flops
        decode_s = read_tokens * model.kv_bytes_per_token / self.memory_bytes_per_s
        fixed_s = self.step_s + requests * self.request_s
        return fixed_s + max(linear_s, weights_s) + attention_s + decode_s

    def costs(
        self,
        model: Model,
        chunk_tokens: int,
        step_tokens: int,
        ssd_gbps: float,
        measured_steps: bool = False,
    ) -> dict[str, Any]:
        """The same machine as the mapping that a policy's Costs are read from (continuum_lmcache.costs).

        `step_tokens` is the prefill chunk: its share of the fixed cost falls on each token. With
        `measured_steps` also the times of steps, as if somebody had measured this machine.
        """
        share_s = (self.step_s + 2 * model.parameters * self.chunk_c0 / self.linear_flops) / step_tokens
        per_token_s = 2 * model.parameters / self.linear_flops + share_s
        per_pair_s = 4 * model.layers * model.hidden / self.attention_flops
        curve = {"fixed_s": 0.0, "per_token_s": per_token_s, "per_pair_s": per_pair_s, "samples": 0}
        steps = {n: self.seconds(model, [(n, 0)] if n else [(1, 0)]) for n in STEP_SIZES}
        return {
            **({"steps": steps} if measured_steps else {}),
            "prefill": curve,
            "dram": {"bytes_per_s": self.link_gbps * 1e9, "fixed_s": 0.0, "samples": 0},
            "ssd": {"bytes_per_s": ssd_gbps * 1e9, "fixed_s": 0.0, "samples": 0},
            "kv_bytes_per_token": model.kv_bytes_per_token,
            "chunk_tokens": chunk_tokens,
        }


EXPECTED = {"str": "text", "bool": "true or false", "int": "a number >= 0", "float": "a number >= 0"}


def _fits(value: Any, kind: str) -> bool:
    """Whether a value from a file is of a field's kind."""
    if kind == "str":
        return isinstance(value, str)
    if kind == "bool":
        return isinstance(value, bool)
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _sheet(
    name: str, tflops: float, share: float, attention: float, tbps: float, memory: float, kv: int, link: float
) -> Machine:
    """A machine by its data sheet: peak rates, and the share of each that programs reach."""
    return Machine(
        name,
        linear_flops=tflops * 1e12 * share,
        attention_flops=tflops * 1e12 * attention,
        memory_bytes_per_s=tbps * 1e12 * memory,
        kv_tokens=kv,
        link_gbps=link,
        source="data sheet x assumed efficiency",
    )


MACHINES = {
    machine.name: machine
    for machine in (
        # bfloat16 TFLOP/s, share in linear layers and in attention, memory TB/s and share, KV, link
        _sheet("a100", 312, 0.55, 0.45, 2.04, 0.8, 480_000, 25),
        _sheet("h100", 990, 0.70, 0.70, 3.35, 0.8, 434_000, 50),
        _sheet("h200", 990, 0.70, 0.70, 4.80, 0.8, 868_000, 50),
        _sheet("b200", 2250, 0.45, 0.35, 8.00, 0.75, 1_168_000, 50),
    )
}
"""Eight-billion-parameter serving on one card. h100 and h200: shares and pools fitted to a published
FCFS sweep; a100 and b200: assumed."""
