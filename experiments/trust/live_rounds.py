"""Real servers whose adapters, weights, processes and files change beside requests: is every token right?

    python -m experiments.trust.live_rounds play FOLDER --seed 7     # 150 answers, ten minutes
    python -m experiments.trust.live_rounds judge FOLDER             # of one play, or of several

The control is `play --no-checksums --only damage`: LMCache's files are believed, and `judge` finds wrong
tokens.

vLLM with `--scheduling-policy continuum`, two adapters, and an LMCache server with a little DRAM and a disk.
Three tenants, each with an API key of its own, hold conversations with the model and both adapters. All begin
with the same few texts, so KV of another tenant, adapter, version or checkpoint has their tokens. In each
round each tenant asks the model and both adapters beside a change, and again after it:

    again      an adapter is saved over, unloaded and loaded
    in place   it is saved over and loaded in place, in a pause or not
    weights    the model's own are others, in a pause or not
    lmcache    its server is killed, and starts again
    engine     the engine or all of vLLM is killed, and starts again with what the folders have by then
    damage     files of LMCache's disk are damaged, and what is above the disk is dropped
    dropped    what is above the disk is dropped

Then the weights and each adapter's version in plain PyTorch, without vLLM and without a cache, compute every
answer's tokens. In float32: each token is the most likely one, or one as likely but for rounding.
Not judged, and not counted: what is asked beside a change without a pause by which vLLM lets requests go on
with other weights than they began with, and what found no server.

On a CPU stock vLLM gives a token without an adapter that of the last slot (`python -m
experiments.trust.stock_adapters FOLDER`). So there are more slots here than loads, and the last one is empty:
without that the model's own answers are wrong, and its KV too. What needs full slots is asked of adapters
alone, by tests/test_adapters_real.py.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import torch
import typer
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file

from connectors.lmcache_mp.wire import MODULE
from experiments.forking_vllm import COMMAND
from experiments.mp_server import MpProcess, serve_mp
from experiments.server import processes, serve
from experiments.tiny_adapters import RANK, WIDTHS, save_adapter
from experiments.tiny_model import KV_BYTES_PER_TOKEN, make_model
from experiments.trust.damage import DAMAGE, files_of

TENANTS = ("key-a", "key-b", "key-c")
AT_ONCE = 3  # a tenant's questions: to the model and to each adapter
MODEL, ADAPTERS, VERSIONS = "tiny", ("a", "b"), 3
CHECKPOINTS = (0, 1)  # their seeds
CHUNK_TOKENS, L1_CHUNKS, DISK_GB = 128, 48, 0.25
PLAYED = "played.json"
WEIGHTS, A, B = "adapter_model.safetensors", ".lora_A.weight", ".lora_B.weight"
OUTPUT_TOKENS, TOOL_TOKENS = 12, (40, 150)
FIRST_TOKENS, LONGEST_TOKENS, WINDOW_TOKENS = 2 * CHUNK_TOKENS + 40, 700, 2048
STORIES = 3
ALIKE, ROUNDING = 1e-3, 0.02  # of log probabilities in float32; other KV is off by more than 0.1
SLOTS = 32  # more than are loaded between two starts, so that the last one is empty: see stock_adapters
ALWAYS = ("--dtype", "float32", "--max-model-len", str(WINDOW_TOKENS))
OURS = ("--scheduling-policy", "continuum", "--num-gpu-blocks-override", "28", "--shutdown-timeout", "20")
ENV = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_SERVER_DEV_MODE": "1",
    "CONTINUUM_POLICY": "static-ttl",
}
DECK = ("again", "again", "in place", "weights", "lmcache", "engine", "damage", "dropped")
State = tuple[int, int]  # the weights' number and the adapter's version, 0 for none
Scores = list[tuple[float, float]]  # of each token: its log probability, and that of the most likely one


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion, and the states of model and adapter that it may be of: of one of them whole."""

    number: int  # of the round
    change: str
    name: str  # of the model or adapter
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logprobs: tuple[float, ...]
    states: frozenset[State]

    def row(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self) | {"states": sorted(self.states)}

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Answer:
        lists = {name: tuple(row[name]) for name in ("prompt", "output", "logprobs")}
        return cls(**row | lists | {"states": frozenset((weights, of) for weights, of in row["states"])})


@dataclass(frozen=True, slots=True)
class Change:
    """What a change means for requests beside it."""

    kind: str
    mixed: frozenset[str] = frozenset()  # names whose running requests go on with other weights
    refused: frozenset[str] = frozenset()  # names that may be unknown meanwhile
    cuts: bool = False  # running requests end early
    fails: bool = False  # there is no server meanwhile


@dataclass(slots=True)
class Conversation:
    """One tenant's with the model or an adapter: the next turn's prompt."""

    program: str
    prompt: list[int]


def is_right(answer: Answer, scores: Scores) -> bool:
    """Whether the model without a cache chooses each token, with the log probability that it came with."""
    return all(
        own >= best - ALIKE and abs(own - said) < ROUNDING
        for said, (own, best) in zip(answer.logprobs, scores, strict=True)
    )


def states_of(name: str, weights: int, newest: Mapping[str, int]) -> State:
    return weights, newest.get(name, 0)


class Servers:
    """vLLM and LMCache's server, and what they were told last."""

    def __init__(self, folder: Path, draw: random.Random, mp: MpProcess, until: ExitStack) -> None:
        self.folder, self.draw, self.mp, self._until = folder, draw, mp, until
        self.checkpoints = [make_model(folder / f"weights-{seed}", seed) for seed in CHECKPOINTS]
        self.latest = make_model(folder / "latest")
        self.weights, self.newest = 0, dict.fromkeys(ADAPTERS, 0)
        self.done, self.found = Counter[str](), Counter[str]()
        self.url = ""
        self._starts = 0
        self._running = ExitStack()
        self.start()

    # ---- vLLM

    def start(self) -> None:
        """A vLLM with what the folders have, at a new port."""
        (self.latest / "model.safetensors").unlink()
        (self.latest / "model.safetensors").hardlink_to(self.checkpoints[self.weights] / "model.safetensors")
        self._starts += 1
        args = [*ALWAYS, *lora(SLOTS), *OURS, "--api-key", *TENANTS]
        args += ["--kv-transfer-config", json.dumps(self.mp.transfer_config)]
        log = self.folder / f"vllm-{self._starts}.log"
        env = {**ENV, "VLLM_CACHE_ROOT": str(self.folder / "cache")}
        self._running = self._until.enter_context(ExitStack())
        self.url = self._running.enter_context(serve(self.latest, args, log=log, env=env, vllm=COMMAND))
        for name in ADAPTERS:
            self._load(name, self.save(name))

    def post(self, path: str, body: object = None, **params: str) -> None:
        headers = {"Authorization": f"Bearer {TENANTS[0]}"}
        sent = httpx.post(f"{self.url}/{path}", json=body, params=params, headers=headers, timeout=300)
        assert sent.is_success, (path, sent.text)

    def ask(self, key: str, name: str, conversation: Conversation, is_last: bool) -> dict[str, Any] | str:
        """A completion's only choice; or why there is none."""
        body = {"model": name, "prompt": conversation.prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "logprobs": 1, "return_token_ids": True}
        body |= {"job_id": conversation.program, "is_last_step": is_last}
        headers = {"Authorization": f"Bearer {key}"}
        try:
            answer = httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=300)
        except httpx.TransportError as error:
            return type(error).__name__
        if answer.is_success:
            return dict(answer.json()["choices"][0])
        return "unknown" if answer.status_code == 404 else f"{answer.status_code} {answer.text}"

    def count_sources(self) -> None:
        """Add this vLLM's tokens by where they were found."""
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=60).text):
            for sample in family.samples:
                if sample.name == "continuum_prompt_tokens_total":
                    self.found[sample.labels["tier"]] += int(sample.value)

    # ---- the changes. Each returns what it means for requests beside it, and does it when called

    def save(self, name: str) -> Path:
        version = (name, self.newest[name])
        return save_adapter(self.folder / f"adapter-{name}", self.latest, version)

    def _load(self, name: str, folder: Path, **fields: Any) -> None:
        self.post("v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder), **fields})

    def again(self) -> tuple[Change, Callable[[], None]]:
        name, new = self.draw.choice(ADAPTERS), self.draw.randrange(VERSIONS)

        def change() -> None:
            self.newest[name] = new
            folder = self.save(name)
            self.post("v1/unload_lora_adapter", {"lora_name": name})
            self._load(name, folder)

        return Change("again", refused=frozenset({name})), change

    def in_place(self) -> tuple[Change, Callable[[], None]]:
        name, new = self.draw.choice(ADAPTERS), self.draw.randrange(VERSIONS)

        def change() -> None:
            self.newest[name] = new
            self._load(name, self.save(name), load_inplace=True)

        return self._paused("in place", frozenset({name}), change)

    def new_weights(self) -> tuple[Change, Callable[[], None]]:
        def change() -> None:
            self.weights = 1 - self.weights
            kwargs = {"weights_path": str(self.checkpoints[self.weights])}
            self.post("collective_rpc", {"method": "reload_weights", "kwargs": kwargs})

        return self._paused("weights", frozenset({MODEL, *ADAPTERS}), change)

    def _paused(
        self, kind: str, names: frozenset[str], change: Callable[[], None]
    ) -> tuple[Change, Callable[[], None]]:
        mode = self.draw.choice(["", "wait", "abort", "abort"])
        clear_cache = self.draw.choice(["true", "false"])
        if not mode:
            return Change(kind, mixed=names), change

        def paused() -> None:
            self.post("pause", mode=mode, clear_cache=clear_cache)
            change()
            self.post("resume")

        return Change(f"{kind}, paused by {mode}", cuts=mode == "abort"), paused

    def kill_lmcache(self) -> tuple[Change, Callable[[], None]]:
        away_s = self.draw.choice([0.0, 2.0])

        def change() -> None:
            self.mp.kill()
            if self.draw.random() < 0.5:
                self.damage_files()
            time.sleep(away_s)
            self.mp.start()

        return Change("lmcache"), change

    def kill_engine(self) -> tuple[Change, Callable[[], None]]:
        whole = self.draw.random() < 0.5

        def change() -> None:
            with suppress(httpx.TransportError):
                self.count_sources()
            front, *behind = processes(self.url)
            engines = [each for each in behind if "EngineCore" in " ".join(each.cmdline())]
            if whole:
                os.killpg(front.pid, signal.SIGKILL)
            else:
                engines[0].kill()
                psutil.wait_procs([front], timeout=60)
            self._running.close()
            if self.draw.random() < 0.5:
                self.damage_files()
            if self.draw.random() < 0.5:
                self.weights = 1 - self.weights
            for name in ADAPTERS:
                self.newest[name] = self.draw.randrange(VERSIONS)
            self.start()

        return Change("engine", fails=True), change

    def damage(self) -> tuple[Change, Callable[[], None]]:
        def change() -> None:
            self.damage_files()
            self.mp.clear_l1()
            self.drop_gpu()

        return Change("damage"), change

    def damage_files(self) -> None:
        files = files_of(self.mp.disk)
        for file in self.draw.sample(files, min(len(files) // 2, 6)):
            with suppress(FileNotFoundError, ValueError, IndexError):  # evicted meanwhile, or not yet whole
                self.draw.choice(DAMAGE)(file, self.draw)
                self.done["damaged files"] += 1

    def drop(self) -> tuple[Change, Callable[[], None]]:
        def change() -> None:
            self.mp.clear_l1()
            self.drop_gpu()

        return Change("dropped"), change

    def drop_gpu(self) -> None:
        """vLLM's own prefix cache; it refuses beside running requests."""
        self.post("reset_prefix_cache")


class Rounds:
    """The tenants' conversations and the answers to be judged."""

    def __init__(self, servers: Servers, draw: random.Random, deck: Sequence[str] = DECK) -> None:
        self.servers, self.draw, self.deck = servers, draw, deck
        self._dealt: list[str] = []
        self.stories = [drawn(draw, FIRST_TOKENS) for _ in range(STORIES)]
        self.open: dict[tuple[str, str], Conversation] = {}
        self.answers: list[Answer] = []
        self.failed: list[str] = []
        self._programs = 0

    def play(self, number: int) -> None:
        """A change with requests beside it, and requests after it."""
        servers = self.servers
        changes = {
            "again": servers.again,
            "in place": servers.in_place,
            "weights": servers.new_weights,
            "lmcache": servers.kill_lmcache,
            "engine": servers.kill_engine,
            "damage": servers.damage,
            "dropped": servers.drop,
        }
        means, change = changes[self.next_kind()]()
        before = servers.weights, dict(servers.newest)
        with ThreadPoolExecutor(AT_ONCE * len(TENANTS)) as clients:
            beside = [clients.submit(self.ask, *turn) for turn in self.next_turns()]
            time.sleep(self.draw.choice([0.0, 0.1, 0.4]))
            change()
            states = [before, (servers.weights, servers.newest)]
            for each in beside:
                self.take(number, means, states, *each.result())
            servers.done[means.kind] += 1
            after = [clients.submit(self.ask, *turn) for turn in self.next_turns()]
            for each in after:
                self.take(number, Change(f"after {means.kind}"), states[1:], *each.result())

    def next_kind(self) -> str:
        """The whole deck in a drawn order, again and again: no play of 150 answers goes without a kind."""
        self._dealt = self._dealt or self.draw.sample(self.deck, len(self.deck))
        return self._dealt.pop()

    def next_turns(self) -> list[tuple[str, str, Conversation, bool]]:
        """Each tenant's next questions, as the next turns of its conversations: by key, and to whom."""
        return [
            (key, name, self.conversation(key, name), self.draw.random() < 0.1)
            for key in TENANTS
            for name in self.draw.sample([MODEL, *ADAPTERS], AT_ONCE)
        ]

    def conversation(self, key: str, name: str) -> Conversation:
        """The tenant's with the model or an adapter, or a new one after a long one."""
        held = self.open.get((key, name))
        if held is None or len(held.prompt) > LONGEST_TOKENS:
            self._programs += 1
            held = Conversation(f"program-{self._programs}", list(self.draw.choice(self.stories)))
            self.open[key, name] = held
        return held

    def ask(
        self, key: str, name: str, conversation: Conversation, is_last: bool
    ) -> tuple[str, Conversation, dict[str, Any] | str]:
        return name, conversation, self.servers.ask(key, name, conversation, is_last)

    def take(
        self,
        number: int,
        means: Change,
        states: Iterable[tuple[int, dict[str, int]]],
        name: str,
        conversation: Conversation,
        choice: dict[str, Any] | str,
    ) -> None:
        """Keep an answer that can be judged; the conversation goes on after a whole one."""
        if isinstance(choice, str):
            expected = means.fails or (choice == "unknown" and name in means.refused)
            self.servers.done["found no server or adapter"] += expected
            if not expected:
                self.failed.append(f"round {number}, {means.kind}, {name}: {choice[:200]}")
            return
        output = choice["token_ids"]
        if len(output) < OUTPUT_TOKENS and not (means.cuts or means.fails):
            self.failed.append(
                f"round {number}, {means.kind}, {name}: {len(output)} tokens of {OUTPUT_TOKENS}"
            )
        if name in means.mixed:
            self.servers.done["not judged"] += 1
        elif output:
            answer = Answer(
                number,
                means.kind,
                name,
                tuple(conversation.prompt),
                tuple(output),
                tuple(choice["logprobs"]["token_logprobs"]),
                frozenset(states_of(name, *each) for each in states),
            )
            self.answers.append(answer)
        if len(output) == OUTPUT_TOKENS:
            conversation.prompt += output + drawn(self.draw, self.draw.randint(*TOOL_TOKENS))


def lora(slots: int) -> tuple[str, ...]:
    """Of `vllm serve`. Two adapters in two slots: the model's own answers beside them are wrong on a CPU."""
    counts = ("--max-lora-rank", str(RANK), "--max-loras", str(slots), "--max-cpu-loras", "64")
    return "--enable-lora", *counts, "--lora-target-modules", *WIDTHS  # all others are a third of the time


def drawn(draw: random.Random, tokens: int) -> list[int]:
    return [draw.randrange(300, 4000) for _ in range(tokens)]


# ---- the judge


def reference(folder: Path, weights: int, name: str, version: int) -> Any:
    """A checkpoint with an adapter's version merged into it, in the transformers library."""
    from transformers import AutoModelForCausalLM

    checkpoint = str(make_model(folder / f"weights-{weights}", weights))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    if name == MODEL:
        return model
    tensors = load_file(save_adapter(folder / f"{name}{version}", folder, (name, version)) / WEIGHTS)
    for key in tensors:
        if key.endswith(A):
            module = model.get_submodule(key.removeprefix("base_model.model.").removesuffix(A))
            module.weight.data += tensors[key.replace(A, B)] @ tensors[key]
    return model


@torch.inference_mode()
def scores_of(answer: Answer, model: Any) -> Scores:
    tokens = [*answer.prompt, *answer.output]
    logits = model(torch.tensor([tokens])).logits[0, len(answer.prompt) - 1 : -1]
    scores = torch.log_softmax(logits, dim=-1)
    return [(row[token].item(), row.max().item()) for row, token in zip(scores, answer.output, strict=True)]


def judged(answers: Sequence[Answer], folder: Path) -> tuple[list[bool], int, int]:
    """Which are right; of how many it was asked whether another version would pass, and how many did."""
    right = [False] * len(answers)
    asked = passed = 0
    for weights, name in itertools.product(CHECKPOINTS, (MODEL, *ADAPTERS)):
        for version in range(1 if name == MODEL else VERSIONS):
            model = reference(folder, weights, name, version)
            for index, answer in enumerate(answers):
                if answer.name == name and (weights, version) in answer.states:
                    right[index] |= is_right(answer, scores_of(answer, model))
                elif answer.name == name and index % 10 == 0:
                    asked, passed = asked + 1, passed + is_right(answer, scores_of(answer, model))
    return right, asked, passed


app = typer.Typer(add_completion=False)


@app.command()
def play(
    folder: Annotated[Path, typer.Argument(help="for logs, LMCache's files and the answers; a new one")],
    seed: Annotated[int | None, typer.Option(help="of everything that is drawn; else a new one")] = None,
    requests: Annotated[int, typer.Option(help="answers that can be judged")] = 150,
    minutes: Annotated[float, typer.Option(help="at most, in whole rounds, once all runs")] = 30.0,
    only: Annotated[str, typer.Option(help="kinds of changes, with commas")] = ",".join(DECK),
    checksums: Annotated[bool, typer.Option(help="without them LMCache's files are believed")] = True,
) -> None:
    """Rounds on real servers. `judge` says whether the answers were right."""
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    print(f"--seed {seed}", flush=True)
    draw, number = random.Random(seed), 0
    l1_gb = L1_CHUNKS * CHUNK_TOKENS * KV_BYTES_PER_TOKEN["float32"] / 2**30
    more = ["--chunk-size", str(CHUNK_TOKENS)]
    if not checksums:
        more += ["--server-module", json.dumps({"module_path": MODULE, "config": {"checksums": False}})]
    with ExitStack() as until:
        lmcache = serve_mp(
            l1_gb, folder / "disk", folder / "mp.log", *more, module=checksums, disk_gb=DISK_GB
        )
        servers = Servers(folder, draw, until.enter_context(lmcache), until)
        rounds, end_s = Rounds(servers, draw, only.split(",")), time.monotonic() + 60 * minutes
        while len(rounds.answers) < requests and time.monotonic() < end_s:
            rounds.play(number := number + 1)
            write(folder, {"seed": seed, "rounds": number}, rounds)
        servers.count_sources()
    print(json.dumps(write(folder, {"seed": seed, "rounds": number}, rounds), indent=1))


def write(folder: Path, about: dict[str, Any], rounds: Rounds) -> dict[str, Any]:
    """Keep what was played so far; returns it without the answers."""
    servers = rounds.servers
    refused = (folder / "mp.log").read_text(errors="replace").count("is damaged, or has no checksum")
    about |= {"answers": len(rounds.answers), "done": dict(sorted(servers.done.items()))}
    about |= {"files refused": refused, "prompt tokens": dict(servers.found), "failed": rounds.failed}
    (folder / PLAYED).write_text(json.dumps(about | {"answers": [each.row() for each in rounds.answers]}))
    return about


@app.command()
def judge(folders: Annotated[list[Path], typer.Argument(help="of plays")]) -> None:
    """Exit status 1 if a token is wrong or a request failed without a reason."""
    played = [json.loads((folder / PLAYED).read_text()) for folder in folders]
    answers = [[Answer.of_row(row) for row in each["answers"]] for each in played]
    right, others, passed = judged(list(itertools.chain.from_iterable(answers)), folders[0])
    verdicts, are_wrong = iter(right), False
    for folder, each, of_folder in zip(folders, played, answers, strict=True):
        wrong = [answer for answer, is_fine in zip(of_folder, verdicts, strict=False) if not is_fine]
        tokens = sum(len(answer.output) for answer in of_folder)
        print(f"{folder}: {len(of_folder)} answers, {tokens} tokens; {len(wrong)} wrong answers")
        lines = [f"round {answer.number}, {answer.change}: {answer.name}" for answer in wrong]
        print("\n".join([*lines, *each["failed"]]))
        are_wrong |= bool(wrong or each["failed"])
    print(f"{passed} of {others} would pass as another version's")
    raise typer.Exit(are_wrong)


if __name__ == "__main__":
    app()
