"""The start options of the baselines' rows, and the rows of servers that failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from experiments.baselines import CONTENDERS, cause, figures, outcome, setup, table
from experiments.mp_server import MpProcess

STOCK = [who for who in CONTENDERS if not who.lmcache.is_ours]


def started(who: Any, folder: Path) -> tuple[MpProcess | None, dict[str, Any], list[str], dict[str, str]]:
    lmcache = who.lmcache
    mp = None
    if lmcache.mp:
        mp = MpProcess(0.2, folder, folder / "log", module=lmcache.is_ours, tuned=lmcache.tuned)
    how = setup(who, folder, mp)
    at = how.args.index("--kv-transfer-config")
    return mp, json.loads(how.args[at + 1]), how.args, how.env


@pytest.mark.parametrize("who", STOCK, ids=lambda who: who.label)
def test_nothing_of_ours_is_in_a_stock_row_but_the_scheduler_where_the_row_names_it(
    who: Any, tmp_path: Path
) -> None:
    mp, config, args, env = started(who, tmp_path)
    assert "ontinuum" not in config["kv_connector"] and "connectors" not in json.dumps(config)
    if mp is not None:
        assert "--server-module" not in mp.command()
    if who.policy == "fcfs":
        assert "--scheduling-policy" not in args and "kv_connector_module_path" not in config
        assert not any(name.startswith("CONTINUUM_") for name in env)
    else:
        assert config["kv_connector_module_path"].startswith("vllm.")


def test_a_stock_server_as_documented_has_no_option_that_we_recommend(tmp_path: Path) -> None:
    (who,) = (w for w in STOCK if w.lmcache.mp and not w.lmcache.tuned and w.policy == "fcfs")
    mp, config, *_ = started(who, tmp_path)
    assert mp is not None
    for option in ("--supported-transfer-mode", "--shm-name", "--l2-prefetch-policy"):
        assert option not in mp.command()
    assert not any("odirect" in part for part in mp.command())
    assert "kv_load_failure_policy" not in config
    assert config["kv_connector_extra_config"].keys() == {"lmcache.mp.host", "lmcache.mp.port"}


def summary(**tokens: int) -> dict[str, Any]:
    found = {"job_time_s": {"n": 0}, "ttft_s": {"n": 0}, "cut_s": [], "errors": 0}
    return found | {"programs": 3, "finished": 3, "tokens_by_source": {"gpu": 10, "computed": 5} | tokens}


def test_a_row_without_a_hit_says_so_with_the_exception_in_its_log() -> None:
    why = "RuntimeError: No supported cpu connector found."
    assert outcome(summary(offload=0), why) == f"not one hit in LMCache; {why}"
    assert outcome(summary(offload=5), why) == "", "an exception alone is no outcome"
    assert outcome(summary(dram=0, ssd=2), "") == ""


def test_a_row_that_was_cut_off_says_with_how_many_programs() -> None:
    cut = summary(offload=5) | {"cut_s": [1.0, 2.0], "errors": 1}
    assert outcome(cut, "") == "cut off by the time limit with 2 programs running; 1 turns failed"


def test_stocks_tokens_are_split_as_its_server_found_them() -> None:
    row = figures(summary(offload=90), {"dram": 200.0, "ssd": 100.0})
    assert (row["dram_tokens"], row["ssd_tokens"], row["job_mean_s"]) == (60, 30, None)
    assert figures(summary(dram=1, ssd=2), {})["ssd_tokens"] == 2
    lines = table([row | {"lmcache": "stock", "policy": "fcfs", "outcome": ""}])
    assert len(lines[0]) == len(lines[1])


def test_the_cause_is_the_first_exception_of_the_first_log_that_has_one(tmp_path: Path) -> None:
    log, other = tmp_path / "vllm.log", tmp_path / "lmcache.log"
    log.write_text(
        "(Worker) WARNING [base.py:214] no ValueError here\n"
        "(EngineCore pid=7) \x1b[31mERROR\x1b[0m 11-22 [core.py:1512] KeyError: 'cmpl-8'\n"
        "(APIServer) ERROR [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: see above\n"
    )
    other.write_text("AssertionError\n")
    assert cause(log, other) == "KeyError: 'cmpl-8'"
    assert cause(tmp_path / "none.log", other) == "AssertionError"
    assert cause(tmp_path / "none.log") == ""
    other.write_text("LMCache INFO: fine\n\x1b[31mLMCache ERROR:\x1b[0m No handler registered\n")
    assert cause(other) == "LMCache ERROR: No handler registered"
