"""gpu_check without a GPU: a stage's results are kept, with any result of the next stage."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from statistics import fmean

import pytest

pytest.importorskip("vllm")

import psutil
import torch
from typer.testing import CliRunner
from waiting import PATIENCE_S, wait_for

from connectors.lmcache_mp.settings import with_defaults
from connectors.lmcache_mp.translation import EngineShape, translated
from experiments import exactness, gpu_check
from experiments.gpu import agents, page, place
from experiments.gpu_check import STAGES, app, run_stage
from experiments.server import ServerError, fast_dtype
from experiments.tiny_model import KV_BYTES_PER_TOKEN, MODELS, profile_here


def figures(worst_token: float, worst_turn: float) -> dict[str, float]:
    return {"worst_token": worst_token, "worst_turn": worst_turn}


def test_a_token_further_off_than_rounding_is_a_failure() -> None:
    assert not exactness.wrong({"pressed": figures(9e-4, 1e-4)}, 1e-3)
    (said,) = exactness.wrong({"pressed": figures(2e-3, 1e-4)}, 1e-3)
    assert "off by 0.002" in said


def test_a_turn_twice_as_far_off_as_rounding_makes_it_is_a_failure() -> None:
    found = {"roomy": figures(0.9, 0.2), "pressed": figures(0.9, 0.41)}
    (said,) = exactness.wrong(found, None)
    assert "off by 0.41" in said


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_what_the_stages_ask_of_lmcache_is_accepted(is_hybrid: bool, tmp_path: Path) -> None:
    asked = exactness.below(exactness.LMCACHE, tmp_path, "float32", is_hybrid)["kv_transfer_config"]
    extra, said = translated(asked.kv_connector_extra_config, {}, EngineShape(1, 16, 16384, 2048))
    assert with_defaults(extra) and "--l2-adapter" in said


@pytest.mark.parametrize("name", MODELS)
def test_each_models_answer_depends_on_the_first_token_of_its_context(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beyond the longest window: else lost KV, or a lost state, would not be noticed."""
    monkeypatch.setattr(exactness, "WORK", tmp_path)
    model, context = exactness.reference(name=name), exactness.drawn(random.Random(0), 600)
    with torch.inference_mode():
        rows = torch.tensor([context, [context[0] + 1, *context[1:]]])
        one, other = torch.log_softmax(model(rows).logits[:, -8:], dim=-1)
    assert (one - other).abs().max() > 0.1


@pytest.mark.parametrize("where", [place.CPU, place.GPU], ids=["cpu", "gpu"])
def test_the_agents_programs_fit_the_window_and_so_many_sessions_do_not_fit_the_memory(
    where: place.Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRACES_DIR", str(tmp_path / "none"))  # as on a host without the traces
    trace = agents.written(agents.pool(where), tmp_path / "programs.jsonl")
    chosen = agents.selection(trace, 24).programs(print)
    assert max(program.context_tokens for program in chosen) <= where.window_tokens
    mean_tokens = fmean(turn.context_tokens for program in chosen for turn in program.turns)
    assert max(where.sessions) * mean_tokens > where.kv_tokens > 4 * mean_tokens


def test_a_stage_that_outlives_its_limit_is_ended_and_says_so(tmp_path: Path) -> None:
    row = run_stage("exact", tmp_path, limit_s=1.5)
    assert "not done after" in row["failed"]
    assert json.loads((tmp_path / "exact.json").read_text()) == row


def test_what_a_stage_started_ends_with_it() -> None:
    """A server has its own session: killing the stage's group alone would leave it."""
    code = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True).wait()"
    stage = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    while not (started := psutil.Process(stage.pid).children()):
        time.sleep(0.05)
    gpu_check.end(stage)
    assert stage.returncode is not None
    _, alive = psutil.wait_procs(started, timeout=PATIENCE_S)
    assert not alive


def test_a_check_that_is_asked_to_stop_takes_its_stages_with_it(tmp_path: Path) -> None:
    python = tmp_path / "python"  # of the stage
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    code = f"""
import sys
from experiments import gpu_check
sys.executable = {str(python)!r}
gpu_check.checked = lambda _, chosen, limit_s, out, *more: gpu_check.run_stage(chosen[0], out, limit_s)
gpu_check.app()
"""
    check = subprocess.Popen([sys.executable, "-c", code, "--out", str(tmp_path)], cwd=gpu_check.ROOT)
    parent = psutil.Process(check.pid)
    wait_for(lambda: [p.name() for p in parent.children()] == ["sleep"], "a stage runs")
    started = parent.children()
    check.terminate()
    check.wait(PATIENCE_S)
    _, alive = psutil.wait_procs(started, timeout=30)
    for process in alive:
        process.kill()
    assert not alive


def test_after_every_stage_the_page_has_it_and_those_that_ran_before(tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text(json.dumps({"failed": "no cores", "seconds": 3.0}))
    ran = CliRunner().invoke(app, ["--only", "versions", "--out", str(tmp_path)])
    assert ran.exit_code == 0, f"an earlier failure is not this run's: {ran.output}"
    text = (tmp_path / "gpu-check.md").read_text()
    assert "| versions |" in text and "lmcache" in text and "| cost | 3 | no cores |" in text


def test_the_queue_goes_on_with_the_stages_that_have_not_passed(tmp_path: Path) -> None:
    assert gpu_check.unfinished(tmp_path) == list(STAGES)
    for stage in STAGES:
        failed = "no card" if stage == "versions" else ""
        (tmp_path / f"{stage}.json").write_text(json.dumps({"failed": failed, "seconds": 3.0}))
    ran = CliRunner().invoke(app, ["--queue", "--out", str(tmp_path)])
    assert ran.exit_code == 0 and "versions: ok" in ran.output and "exact" not in ran.output
    ran = CliRunner().invoke(app, ["--queue", "--out", str(tmp_path)])
    assert ran.exit_code == 0 and "every stage has passed" in ran.output


@pytest.mark.parametrize("failed", ["", "continuum, 24 sessions: no time was left"])
def test_sessions_are_simulated_again_until_all_are_measured(
    failed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "agents.json").write_text(json.dumps({"rows": [], "failed": failed}))
    monkeypatch.setattr(agents, "simulated", lambda *_: [])
    found = gpu_check.simulated(gpu_check.Job(place.CPU, tmp_path, 60.0))
    assert found["failed"] == (failed and "agents has not passed")


def test_the_page_shows_pairs_and_sessions_beside_the_simulators_figures(tmp_path: Path) -> None:
    fcfs = {"tpot_s": 0.004, "first_ttft_s": 0.1, "later_ttft_s": 0.02}
    pairs = [{"sessions": 4, "pair": 0, "continuum": fcfs | {"tpot_s": 0.005}, "fcfs": fcfs}]
    run = {"label": "fcfs", "sessions": 24, "tokens_per_s": 320.0, "ttft_max_s": 9.5, "errors": 0}
    cut = {"label": "continuum", "sessions": 24, "why": "no time was left"}
    of_agents = {"rows": [run, cut], "failed": "", "seconds": 9.0}
    of_simulator = {"rows": [run | {"tokens_per_s": 311.0}], "failed": "", "seconds": 9.0}
    of_level = {"rows": pairs, "failed": "", "seconds": 9.0}
    page.write(
        {"level": of_level, "agents": of_agents, "simulated": of_simulator}, {"device": "cpu"}, tmp_path
    )
    text = (tmp_path / "gpu-check.md").read_text()
    assert "| 4 | a token | 4.00 | 5.00 | 1.2500 |" in text
    assert "| 24 | fcfs | 320 (311) |" in text and "| 24 | continuum | no time was left |" in text


def test_a_server_on_a_cpu_gets_a_dtype_that_the_cpu_has_instructions_for_and_sizes_of_that_dtype(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(agents, "serve", lambda _, args, **__: started.append(args) or nullcontext(""))
    with ExitStack() as until:
        model, profile = tmp_path / "model", tmp_path / "profile.yaml"
        bench = agents.Bench(place.CPU, model, profile, tmp_path, 0.0)
        agents.up(agents.CONTENDERS[0], bench, 1.0, until)
    (args,) = started
    assert args[args.index("--dtype") + 1] == fast_dtype()
    assert place.CPU.kv_bytes_per_token == KV_BYTES_PER_TOKEN[fast_dtype()]
    assert place.CPU.profile == profile_here()


def test_a_server_ends_that_was_starting_when_something_else_was_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A signal in the main thread, while its threads start servers, is such an interruption."""
    ended: list[str] = []

    def up(who: agents.Contender, _bench: object, _start_s: float, own: ExitStack) -> str:
        own.callback(ended.append, who.label)
        if who.order == "continuum":
            raise KeyboardInterrupt
        return "http://127.0.0.1:1"

    monkeypatch.setattr(agents, "up", up)
    bench = agents.Bench(place.CPU, tmp_path, tmp_path, tmp_path, time.monotonic() + 3600)
    with pytest.raises(KeyboardInterrupt), agents.serving(agents.CONTENDERS[:2], bench):
        pytest.fail("nothing is served")
    assert set(ended) == {"fcfs", "continuum"}


def test_servers_are_measured_in_pieces_and_each_run_adds_what_the_ones_before_lack(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What has figures is kept; what failed or had no time runs again."""
    started: list[str] = []

    def up(who: agents.Contender, *_: object) -> str:
        started.append(who.label)
        if who.order == "continuum-published":
            raise ServerError("it exited with 1")
        return f"http://{who.label}"

    async def together(server: agents.Server, pair: int, count: int) -> list[object]:
        return started.append(f"{server.who.label} {count} {pair}") or []

    monkeypatch.setattr(agents, "up", up)
    monkeypatch.setattr(agents, "processes", lambda _: ())
    monkeypatch.setattr(
        agents, "live", lambda server, sessions, *_: {"label": server.who.label, "sessions": sessions}
    )
    monkeypatch.setattr(agents, "together", together)
    monkeypatch.setattr(agents, "pace", lambda _: {"tpot_s": 1.0})

    def bench(left_s: float) -> agents.Bench:
        profile = tmp_path / "profile.yaml"
        return agents.Bench(place.CPU, tmp_path, profile, tmp_path, time.monotonic() + left_s)

    cut = {"label": "continuum", "sessions": 24, "why": "no time was left"}
    earlier = {"rows": [{"label": "fcfs", "sessions": 24}, cut]}
    found = agents.measured(bench(3600), lambda _: None, earlier)
    assert started == ["continuum", "continuum-published", "fcfs+LMCache", "continuum+LMCache"]
    assert {row["label"] for row in found["rows"]} == {"fcfs", *started} and cut not in found["rows"]
    assert found["failed"] == "continuum-published, 24 sessions: it exited with 1"
    found = agents.measured(bench(0), lambda _: None, earlier)
    assert found["failed"].count("no time was left") == len(started) == 4, "no server was started"
    pairs = {"rows": [{"sessions": n, "pair": pair} for n in (1, 4) for pair in range(5)][:-1]}
    started.clear()
    assert agents.level(bench(3600), lambda _: None, pairs)["failed"] == ""
    assert started[2:] == ["fcfs 4 5", "continuum 4 5", "continuum 4 4", "fcfs 4 4"], "warm-up, the last pair"
    assert agents.level(bench(0), lambda _: None, pairs)["failed"].startswith("fcfs: no time was left")
