"""The sweep: its rows, its figures, and three mutations that must show in them. Virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from serving import FORKING

from continuum_lmcache.errors import ConfigError, InvariantError
from continuum_lmcache.policy.interface import Policy
from continuum_lmcache.policy.named import POLICIES
from continuum_lmcache.types import QueueEntry, Retention
from experiments.offload_sweep import Engine, Wanted, cases_of, main, plans_named, wanted
from experiments.policies import no_retention
from experiments.server import ServerError
from experiments.sim.step_time import PAIR, PROFILES
from experiments.sweep import conditions
from experiments.sweep.cases import ENDLESS, STOCK, Live, Point, SweepError
from experiments.sweep.closed_loop import points
from experiments.sweep.grids import Size
from experiments.sweep.live import WATERMARK, WINDOW_GB, l1_of
from experiments.sweep.live import run as run_live
from experiments.sweep.live_plans import LIVE_PLANS
from experiments.sweep.plans import PLANS
from experiments.sweep.readout import caption, found, table
from experiments.sweep.rows import CODE, LIVE, ROOT, SWEEP, Rows, key
from experiments.sweep.runner import complete
from experiments.sweep.simulated import run

SMALL = Point(STOCK, programs=12, jps=0.1, seed=1)
BARE = replace(SMALL, contender="continuum")


def finished(rows: Rows, *cases: Point) -> dict[Point, float]:
    """Mean job times, as the figures read them."""
    complete(rows, cases, jobs=1, quiet=True)
    return {case: float(row["job_mean_s"]) for case, row in found(rows, cases)}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The rows of a quick figure, and those that this file's tests add."""
    folder = tmp_path_factory.mktemp("sweep")
    main(["fig8"], quick=True, jobs=1, out=folder)
    return Rows(folder / "offload_sweep.csv")


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Policy], Point]:
    """Registers a policy for one test, and gives its point."""

    def register(name: str, made: Policy) -> Point:
        monkeypatch.setitem(POLICIES, name, made)
        return replace(SMALL, contender=name)

    return register


def test_a_quick_figure_leaves_its_rows_two_tables_and_two_pictures(rows: Rows) -> None:
    assert rows.missing(PLANS["fig8"].cases(Size.QUICK, [1])) == []
    assert rows.missing([SMALL, BARE]) == []
    names = {path.name for path in rows.path.parent.iterdir()}
    assert names == {"offload_sweep.csv", *(f"fig8-quick.{end}" for end in ("csv", "md", "png", "svg"))}
    assert "| 0.1 programs/s | continuum |" in (rows.path.parent / "fig8-quick.md").read_text()


def test_a_time_to_live_of_nothing_shows_in_the_figure(
    rows: Rows, policy: Callable[[str, Policy], Point]
) -> None:
    mutant = policy("no-ttl", replace(POLICIES["continuum-published"], retain=no_retention))
    job_s = finished(rows, BARE, mutant)
    assert job_s[mutant] > 1.2 * job_s[BARE]


def test_a_broken_order_shows_in_the_figure(rows: Rows, policy: Callable[[str, Policy], Point]) -> None:
    """The newest program first, instead of the oldest."""

    def backwards(standing: QueueEntry) -> tuple[float, ...]:
        return (not standing.preempted, -standing.program_arrival_s, -standing.turn_arrival_s)

    order = replace(SMALL, contender="program-fcfs")
    published = POLICIES["continuum-published"]
    mutant = policy("backwards", replace(published, retain=no_retention, order=backwards))
    job_s = finished(rows, order, mutant)
    assert job_s[mutant] > 1.04 * job_s[order]


def test_finished_rows_are_kept_and_not_run_again(rows: Rows) -> None:
    finished(rows, BARE)
    before = rows.path.read_text()
    again = Rows(rows.path)
    assert again.missing([BARE, BARE]) == []
    complete(again, [BARE], jobs=1, quiet=True)
    assert rows.path.read_text() == before


def test_a_run_that_fails_names_its_point_and_leaves_no_row(
    tmp_path: Path, policy: Callable[[str, Policy], Point]
) -> None:
    def fails(*_: object) -> Retention:
        raise InvariantError("1 != 2")

    point = policy("fails", Policy(fails, POLICIES["continuum"].order))
    rows = Rows(tmp_path / "rows.csv")
    with pytest.raises(SweepError, match=r"contender='fails', programs=12.*: 1 != 2"):
        complete(rows, [point], jobs=1, quiet=True)
    assert rows.missing([point]) == [point]


def test_every_input_is_in_the_key() -> None:
    other: dict[str, object] = {"contender": "plas", "workload": "bfcl", "machine": "h200"}
    changed = [
        replace(SMALL, **{name: other.get(name, 7)})  # type: ignore[arg-type]
        for name in SMALL.__dataclass_fields__
    ]
    assert len({key(case) for case in [SMALL, *changed]}) == len(changed) + 1


def test_a_torn_line_and_a_foreign_file_are_refused_with_what_to_do(tmp_path: Path) -> None:
    torn, foreign = tmp_path / "torn.csv", tmp_path / "foreign.csv"
    torn.write_text(",".join(SWEEP.columns) + "\nabc,def\n")
    foreign.write_text("a,b\n1,2\n")
    with pytest.raises(SweepError, match=r"torn.csv:2 has not .* delete that line"):
        Rows(torn)
    with pytest.raises(SweepError, match="not the columns of schema"):
        Rows(foreign)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    for point, expected in (
        (replace(SMALL, contender="lifo"), "contender is 'lifo'; known: fcfs"),
        (replace(SMALL, workload="poetry"), "workload is 'poetry'; known: swe"),
        (replace(SMALL, machine="tpu"), "machine is 'tpu'; known: a100"),
    ):
        with pytest.raises(SweepError, match=expected):
            run(point)
    with pytest.raises(SystemExit, match="figure 'fig99' is not known to --engine sim; did you mean 'fig9'"):
        main(["fig99"])
    with pytest.raises(SystemExit, match="--regimes chooses rows of figures.*leave it out for sessions"):
        main(["sessions"], regimes="none")


def test_a_simulated_row_is_made_anew_when_its_machine_changes() -> None:
    for kind in ("point", "sessionpoint"):
        files = {path for pattern in CODE[kind] for path in ROOT.glob(pattern)}
        assert {PROFILES / f"{PAIR}.yaml", ROOT / "experiments/sim/datasheets.py"} <= files


OWN = """
from experiments.policies import Policy, no_retention, pinned_first
never = Policy(no_retention, pinned_first)
"""


def test_a_policy_of_ones_own_is_a_contender_of_every_figure_and_of_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_contender.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    chosen, none = "own_contender:never,continuum", "own_contender:nothing"
    for plan in (*PLANS.values(), *LIVE_PLANS.values()):
        cases = cases_of(plan, Size.QUICK, [3], wanted("", chosen, ""))
        own, ours = ([c for c in cases if c.contender == name] for name in chosen.split(","))
        assert own == [replace(c, contender=own[0].contender) for c in ours] != []
        with pytest.raises(ConfigError, match=f"{none}'.*no attribute 'nothing'"):
            cases_of(plan, Size.QUICK, [3], wanted("", none, ""))
    loops = points(Size.QUICK, "2", contenders=chosen, tiers="none")
    assert {case.contender for case in loops} == set(chosen.split(","))
    for figure in ("sessions", "fig8"):
        with pytest.raises(SystemExit, match="offload_sweep: .*No module named 'no_such_module'"):
            main(
                [figure],
                contenders="no_such_module:never",
                trace="claude-code-swe",
                half="fitted",
                out=tmp_path,
            )
    made = run(replace(SMALL, contender="own_contender:never"))
    assert made["pins_taken"] == 0 and made["jobs"] == SMALL.programs


def test_sessions_go_along_the_longest_wait_with_our_policy_alone() -> None:
    loops = points(Size.QUICK, "34", contenders="fcfs,continuum", tiers="none", longest_waits="240,700")
    assert [case.label for case in loops] == ["fcfs", "continuum, 240 s", "continuum, 700 s"]
    with pytest.raises(SweepError, match="--longest-waits '0' is no list of numbers above 0"):
        points(Size.QUICK, longest_waits="0")


def test_a_policy_of_ones_own_runs_again_once_its_module_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_changed.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    case = replace(SMALL, contender="own_changed:never")
    before = key(case)
    (tmp_path / "own_changed.py").write_text(OWN + "# changed\n")
    assert key(case) != before


def test_live_rows_say_on_what_they_were_measured_and_those_of_another_machine_are_not_read(
    tmp_path: Path,
) -> None:
    case = Live(STOCK, programs=3, jps=2.0, seed=1)
    row = Rows(tmp_path / "live.csv", LIVE).add(case, {"job_mean_s": 1.0, "probe_s": 0.1})
    assert row["measured_on"] == conditions.machine() and "lmcache" in row["versions"] and row["ended"]
    assert Rows(tmp_path / "live.csv", LIVE).missing([case]) == []
    text = (tmp_path / "live.csv").read_text()
    (tmp_path / "live.csv").write_text(text.replace(conditions.machine(), "another"))
    assert Rows(tmp_path / "live.csv", LIVE).missing([case]) == [case]


def test_a_server_that_fails_costs_its_own_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = cases = [Live(name, 3, 2.0, 1) for name in (STOCK, "plas", "continuum")]

    def measured(case: Live, _keep: Path) -> dict[str, float]:
        if case == second:
            raise ServerError("exited with 1")
        return {"job_mean_s": 1.0}

    monkeypatch.setattr("experiments.sweep.live.run", measured)
    rows = Rows(tmp_path / "live.csv", LIVE)
    with pytest.raises(SweepError, match=r"1 rows are missing:\n.*'plas'.*exited with 1"):
        complete(rows, cases, jobs=1, quiet=True)
    assert rows.missing(cases) == [second] and len(rows.of([first, third])) == 2
    assert "exited with 1" in capsys.readouterr().err


@pytest.mark.real
def test_a_live_case_runs_on_a_server_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.server.script", lambda *_: FORKING)
    case = Live("static-ttl", programs=2, jps=2.0, seed=1, workload="bfcl", dram_gb=0.1, ssd_gb=0.2)
    rows = Rows(tmp_path / "rows.csv", LIVE)
    complete(rows, [case], jobs=1, quiet=True)
    [row] = rows.of([case])
    assert int(row["jobs"]) == 2
    assert int(row["gpu_tokens"]) > 0, "no turn found its program's prefix"
    assert int(row["pins_taken"]) > 0
    assert float(row["job_p95_s"]) >= float(row["job_p50_s"]) > 0


def test_over_lmcaches_server_a_disk_s_loads_have_room_in_l1_beside_the_case_s_dram() -> None:
    cases = [case for case in LIVE_PLANS["agents"].cases(Size.FULL, [3]) if isinstance(case, Live)]
    disks = [case for case in cases if case.ssd_gb]
    assert {case.workload for case in disks} == {case.workload for case in cases}
    for case in disks:
        l1_gb, watermark = l1_of(case)
        kept_gb = watermark * l1_gb
        assert kept_gb == pytest.approx(case.dram_gb)
        assert l1_gb - kept_gb > WINDOW_GB
        assert l1_of(replace(case, ssd_gb=0.0)) == (case.dram_gb, WATERMARK)


def test_a_faster_machine_has_the_same_live_cases_at_its_own_rate() -> None:
    plan = LIVE_PLANS["fig14"]
    given, mine = plan.cases(Size.FULL, [3]), cases_of(plan, Size.FULL, [3], Wanted(jps=4.0))
    assert {case.jps for case in given} == {0.5, 1.0} and {case.jps for case in mine} == {4.0}
    assert [replace(case, jps=4.0) for case in given if case.jps == 1.0] == mine
    with pytest.raises(SystemExit, match="--jps is for --engine live"):
        main(["fig8"], quick=True, jps=2.0)


def test_the_live_engine_refuses_what_it_cannot_run(tmp_path: Path) -> None:
    for case, expected in (
        (Live(ENDLESS, 3, 1.0, 1), "contender is 'endless-gpu'; known to --engine live: fcfs"),
        (Live(STOCK, 3, 1.0, 1, ssd_gb=1.0), "needs a DRAM tier in front of it"),
        (Live(STOCK, 3, 1.0, 1, workload="chat"), "workload is 'chat'"),
    ):
        with pytest.raises(SweepError, match=expected):
            run_live(case, tmp_path)
    with pytest.raises(SweepError, match="figure 'tiers' is not known to --engine live"):
        plans_named(["tiers"], Engine.LIVE)


def test_a_figure_says_its_size_rate_seeds_and_that_nothing_was_measured(rows: Rows, tmp_path: Path) -> None:
    from experiments.sweep.drawing import draw

    finished(rows, SMALL, BARE)
    plan, pairs = PLANS["fig8"], found(rows, [SMALL, BARE])
    words = caption(pairs)
    for said in ("n = 12 programs", "0.1 a second", "seeds 1", "machine a100, NOT measured"):
        assert said in words
    assert "load 1.5, seeds 1" in caption([(replace(SMALL, jps=0.0, load=1.5), pairs[0][1])])
    assert [line[1] for line in table(plan, pairs)[1:]] == ["fcfs", "continuum"]
    png, svg = draw(plan, pairs, tmp_path / "figure")
    assert png.stat().st_size > 10_000 and "<svg" in svg.read_text()
