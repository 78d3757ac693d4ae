"""Stock vLLM on a CPU, without this package and LMCache: is the model's own answer right beside an adapter?

    python -m experiments.trust.stock_adapters FOLDER      # a new one; three servers

Its kernels (vllm/lora/ops/torch_ops/lora_ops.py) give a token without an adapter the index -1, and so the
adapter in the last slot. Each line says how many answers are, by plain PyTorch, the model's own, adapter a's
and adapter b's. With two slots b is in the last one, with three none is; 0 is a server without adapters.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import httpx
import typer

from experiments.forking_vllm import COMMAND
from experiments.server import serve
from experiments.tiny_adapters import save_adapter
from experiments.tiny_model import make_model
from experiments.trust.live_rounds import (
    ADAPTERS,
    ALWAYS,
    FIRST_TOKENS,
    MODEL,
    OUTPUT_TOKENS,
    Answer,
    drawn,
    is_right,
    lora,
    reference,
    scores_of,
)

PROMPTS, LONG_TOKENS = 4, 1500
ENV = {"VLLM_PLUGINS": ""}  # none is loaded, though installed


def main(folder: Annotated[Path, typer.Argument(help="for models and logs; a new one")]) -> None:
    draw = random.Random(0)
    model = make_model(folder / "weights-0")
    alone, beside = ([drawn(draw, FIRST_TOKENS) for _ in range(PROMPTS)] for _ in range(2))
    modules = [f"{name}={save_adapter(folder / name, model, (name, 0))}" for name in ADAPTERS]
    models = {name: reference(folder, 0, name, 0) for name in (MODEL, *ADAPTERS)}

    def show(about: str, answers: Sequence[Answer]) -> None:
        fit = {
            name: sum(is_right(each, scores_of(each, of)) for each in answers) for name, of in models.items()
        }
        print(f"{about}: {fit} of {len(answers)}", flush=True)

    for slots in (2, 3, 0):
        args = [*ALWAYS, *lora(slots), "--lora-modules", *modules] if slots else [*ALWAYS]
        with serve(model, args, log=folder / f"vllm-{slots}.log", env=ENV, vllm=COMMAND) as url:
            for name in (MODEL, *ADAPTERS) if slots else (MODEL,):
                show(f"{slots} slots, {name} alone", [asked(url, name, each) for each in alone])
            if slots:
                with running(url, "a", alone[0]):
                    show(f"{slots} slots, {MODEL} beside a", [asked(url, MODEL, each) for each in beside])
                show(f"{slots} slots, {MODEL} again, alone", [asked(url, MODEL, each) for each in beside])


def asked(url: str, name: str, prompt: list[int]) -> Answer:
    body = {"model": name, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "logprobs": 1, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status()
    choice = answer.json()["choices"][0]
    logprobs = tuple(choice["logprobs"]["token_logprobs"])
    return Answer(0, "", name, tuple(prompt), tuple(choice["token_ids"]), logprobs, frozenset({(0, 0)}))


@contextmanager
def running(url: str, name: str, prompt: list[int]) -> Iterator[None]:
    """A request that decodes meanwhile."""
    body = {"model": name, "prompt": prompt, "max_tokens": LONG_TOKENS, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
        lines = answer.iter_lines()  # it is aborted once nothing holds this
        next(lines)
        yield
        next(lines)  # raises StopIteration if it had ended


if __name__ == "__main__":
    typer.run(main)
