"""Tuning: what is measured, which bands come of it, what is written, and one run on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from purlin_jax import table_edit, tune
from purlin_jax.policy import Choice, Policy, own_folder, table
from purlin_jax.table_check import check
from purlin_jax.table_edit import Contest, fastest, spliced, tuned_rows, with_rows
from purlin_jax.tune import SETTINGS, contests, forced, measure
from tests.harness import mesh
from tests.test_tables import ARCHS

K, M = 1 << 10, 1 << 20
ROOM = {"packet": M, "line": 4 * M}
PACKET = Choice("packet", "hopper", 4, 128, 0, 0)
LINE = Choice("line", "hopper", 64, 512, 0, 0)
GENERIC = Choice("zero_staging", "generic", 32, 512, 0, 0)


def _planned(arch: str, world: int) -> list[Contest]:
    return contests(SETTINGS["cuda"], arch, world, ROOM, lambda atom: atom)


def test_every_candidate_is_a_policy_and_has_its_sizes() -> None:
    for platform in ("cuda", "cpu"):
        settings = SETTINGS[platform]
        for c in settings["candidates"]:
            Policy(c["regime"], c["blocks"], threads=c["threads"], depth=c.get("depth", 0))
            assert c["from_bytes"] <= (c["to_bytes"] or c["from_bytes"])
            assert c["regime"] in table("cpu" if platform == "cpu" else "sm_90")["regimes"]
        assert settings["programs"][-1]["up_to_bytes"] is None
    assert sorted(SETTINGS["cuda"]["sizes"]) == [K << 2 * i for i in range(10)]


@pytest.mark.parametrize("world", (2, 4, 8, 5))
@pytest.mark.parametrize("arch", [a for a in ARCHS if a.startswith("sm_")])
def test_what_is_planned(arch: str, world: int) -> None:
    planned = _planned(arch, world)
    assert {c.ops for c in planned} == {
        ("all_reduce",),
        ("reduce_scatter",),
        ("all_to_all", "all_gather"),
    }
    composed = [c for c in planned if any(w.regime == "zero_staging_composed" for w in c.choices)]
    assert bool(composed) == (world > 2) and {c.ops for c in composed} <= {("all_reduce",)}
    assert sum(len(c.choices) for c in planned) < 250  # at about a second each
    for contest in planned:
        assert 2 <= len(contest.choices) <= 14 and len(set(contest.choices)) == len(contest.choices)
        for choice in contest.choices:
            push = choice.regime == "zero_staging_push"
            assert not push or contest.ops == ("all_to_all", "all_gather")
            assert contest.nbytes < ROOM.get(choice.regime, 1 << 60)


def test_what_the_table_takes_comes_first_and_is_forced_exactly() -> None:
    large = next(c for c in _planned("sm_90", 2) if c.nbytes == 4 * M)
    assert large.choices[0] == Choice("zero_staging", "generic", 32, 512, 0, 0)
    assert forced(PACKET) == Policy("packet", 4, atom="hopper", threads=128)
    # A binary without the table's Atom measures the one that it has.
    older = contests(SETTINGS["cuda"], "sm_90", 2, ROOM, lambda _: "generic")
    assert {w.atom for c in older for w in c.choices} == {"generic"}


def test_ops_that_the_table_keeps_apart_stay_apart(own: Path) -> None:
    found = table("sm_90")
    row = next(r for r in found["rows"] if r["world"] == 2 and "ops" not in r)
    rows = [{**row, "ops": ["all_gather"]}, *found["rows"]]
    (own / "sm_90.json").write_text(json.dumps({**found, "rows": rows}))
    table.cache_clear()
    assert {c.ops for c in _planned("sm_90", 2)} >= {("all_to_all",)}


def test_a_candidate_must_win_by_more_than_the_noise() -> None:
    rng = np.random.default_rng(0)
    own = list(10 + rng.random(9))
    barely = [t * 0.99 for t in own]
    often = [t * (0.9 if i % 2 else 1.1) for i, t in enumerate(own)]
    assert fastest({PACKET: own, LINE: barely}, 0.02) == PACKET
    assert fastest({PACKET: own, LINE: often}, 0.02) == PACKET
    clearly = [t * 0.95 for t in own]
    assert fastest({PACKET: own, LINE: clearly}, 0.02) == LINE
    best = [t * 0.9 for t in own]
    assert fastest({PACKET: own, LINE: clearly, GENERIC: best}, 0.02) == GENERIC
    one_outlier = [*best[:-1], 1000.0]  # a program that was recorded again, for example
    assert fastest({PACKET: own, LINE: one_outlier}, 0.02) == LINE


def _band(limit: int | None, name: str) -> dict[str, Any]:
    return {"up_to_bytes": limit, "regime": name}


OLD = [_band(2 * K, "a"), _band(100 * K, "b"), _band(None, "c")]
SIZES = [K, 4 * K, 16 * K, 64 * K, 256 * K]


@pytest.mark.parametrize(
    ("won", "expected"),
    (
        ({}, "a2 b100 c"),
        ({K: None, 4 * K: None}, "a2 b100 c"),
        ({K: "x"}, "x2 b100 c"),  # the least size stands for all below it
        ({4 * K: "x"}, "a2 x8 b100 c"),  # to twice its size at most, above and below
        ({4 * K: "x", 16 * K: "x"}, "a2 x32 b100 c"),
        ({4 * K: "x", 16 * K: "y"}, "a2 x8 y32 b100 c"),
        ({4 * K: "b"}, "a2 b100 c"),  # what becomes equal is one band
        ({64 * K: "x"}, "a2 b32 x128 c"),
        ({256 * K: "x"}, "a2 b100 c128 x"),  # the largest size stands for all above it
        ({64 * K: "x", 256 * K: "x"}, "a2 b32 x"),
        ({n: "x" for n in SIZES}, "x"),
        ({4 * K: "x", 64 * K: "x"}, "a2 x8 b32 x128 c"),  # 16 KiB was not measured
    ),
)
def test_bands(won: dict[int, str | None], expected: str) -> None:
    winners = {n: _band(None, name) if name else None for n, name in won.items()}
    bands = spliced(OLD, winners, SIZES)
    limits = [f"{b['up_to_bytes'] // K}" if b["up_to_bytes"] else "" for b in bands]
    assert " ".join(b["regime"] + n for b, n in zip(bands, limits, strict=True)) == expected


def test_neighbours_meet_at_the_geometric_mean() -> None:
    bands = spliced([_band(None, "a")], {3000: _band(None, "x"), 6000: _band(None, "y")}, SIZES)
    assert bands == [_band(1500, "a"), _band(4242, "x"), _band(12000, "y"), _band(None, "a")]


def _measured(planned: list[Contest], nbytes: int, win: float) -> dict[Contest, Any]:
    """Samples in which the last candidate takes `win` of the others' time at one size."""
    return {
        c: {w: [win if c.nbytes == nbytes and w == c.choices[-1] else 1.0] * 5 for w in c.choices}
        for c in planned
    }


@pytest.mark.parametrize("world", (2, 4, 6))
def test_the_table_that_is_written(world: int, own: Path) -> None:
    found, planned = table("sm_90"), _planned("sm_90", world)
    rows = tuned_rows(
        found, world, _measured(planned, 16 * M, 0.9), SETTINGS["cuda"]["sizes"], 0.02, "tuned"
    )
    assert [row["ops"] for row in rows] == [
        ["all_reduce"],
        ["reduce_scatter"],
        ["all_to_all", "all_gather"],
    ]
    path = own / "sm_90.json"
    table_edit.write(with_rows(found, "sm_90", rows), path)
    assert not list(own.glob("*.part"))
    written = table("sm_90")
    assert written["rows"][:3] == rows and all(r["source"] == "tuned" for r in rows)
    others = [row for row in found["rows"] if row["world"] != world]
    assert written["rows"][3:] == others
    for row in rows:
        assert 32 * M in [band["up_to_bytes"] for band in row["bands"]]
    assert [c.choices[0] for c in _planned("sm_90", world) if c.nbytes == 16 * M] == [
        c.choices[-1] for c in planned if c.nbytes == 16 * M
    ]


def test_rows_that_nothing_beat_stay_as_they_are() -> None:
    found, planned = table("sm_90"), _planned("sm_90", 2)
    sizes = SETTINGS["cuda"]["sizes"]
    assert tuned_rows(found, 2, _measured(planned, K, 0.99), sizes, 0.02, "") == []
    gathers = {c: s for c, s in _measured(planned, K, 0.9).items() if "all_gather" in c.ops}
    rows = tuned_rows(found, 2, gathers, sizes, 0.02, "")
    assert [row["ops"] for row in rows] == [["all_to_all", "all_gather"]]
    after = with_rows(found, "sm_90", rows)
    check(after)
    kept = [r for r in found["rows"] if r["world"] != 2 or r.get("ops")]
    assert after["rows"] == [*rows, *kept]  # the row of all ops had only the copies left


def test_what_is_no_table_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="null"):
        table_edit.write(
            {**table("cpu"), "rows": [{"world": "any", "source": "", "bands": []}]},
            tmp_path / "cpu.json",
        )
    assert not list(tmp_path.iterdir())


def test_no_contest_begins_that_would_end_late() -> None:
    now = [0.0]

    def race(contest: Contest) -> Any:
        now[0] += 10 * len(contest.choices)
        if contest.nbytes == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too large\nand a trace")
        return {choice: [1.0] for choice in contest.choices}

    planned = [Contest(("all_reduce",), n, (PACKET, LINE)) for n in range(5)]
    planned.append(Contest(("all_reduce",), 5, (PACKET,)))
    measured, left = measure(planned, race, 75.0, lambda: now[0])
    assert [c.nbytes for c in measured] == [0, 1, 5]
    assert {c.nbytes: why for c, why in left.items()} == {
        2: "RESOURCE_EXHAUSTED: too large",
        3: "no time was left",
        4: "no time was left",
    }
    assert now[0] <= 75


def test_a_small_contest_is_not_left_out_for_the_time_of_a_large_one() -> None:
    now = [0.0]

    def race(contest: Contest) -> Any:
        now[0] += (30 if contest.nbytes > M else 10) * len(contest.choices)
        return {choice: [1.0] for choice in contest.choices}

    planned = [Contest(("all_reduce",), n, (PACKET, LINE)) for n in (64 * K, 16 * M, 64 * M, K)]
    measured, left = measure(planned, race, 101.0, lambda: now[0])
    assert [c.nbytes for c in measured] == [64 * K, 16 * M, K]
    assert [c.nbytes for c in left] == [64 * M] and now[0] == 100


def test_wrong_values_are_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tune._EXPECTED, "all_gather", lambda x: np.zeros(x.size * len(x)))
    track = tune.Track(mesh(2, ("i",)), SETTINGS["cpu"])
    meet = Choice("meet", "cpu", 0, 0, 0, 0)
    with pytest.raises(RuntimeError, match=r"tune: all_gather of 1024 bytes gave wrong values"):
        track.race(Contest(("all_to_all", "all_gather"), K, (meet,)))


def test_a_place_that_cannot_be_written_is_refused_at_once() -> None:
    with pytest.raises(SystemExit, match=r"cannot be written .*give --out FILE"):
        tune.run(mesh(2, ("i",)), 5, None)  # PURLIN_POLICIES is no folder here
    with pytest.raises(SystemExit, match="one device has no peer"):
        tune.run(mesh(1, ("i",)), 5, None)


def test_a_run_on_the_cpu(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {
        **SETTINGS["cpu"],
        "sizes": [K, 4 * K],
        "samples": 2,
        "programs": [{"up_to_bytes": None, "calls": 2, "in_flight": 1}],
        # What wins at the largest size must fit all larger ones.
        "candidates": [c for c in SETTINGS["cpu"]["candidates"] if c["to_bytes"] is None],
    }
    monkeypatch.setitem(SETTINGS, "cpu", tiny)
    monkeypatch.setitem(SETTINGS, "least_win", -100.0)  # so that some candidate wins
    tune.run(mesh(2, ("i",)), 5, None)
    printed = capsys.readouterr().out
    assert printed.count(" is beaten by ") == 6 and "left as it was" not in printed
    assert f"wrote {own_folder() / 'cpu.json'}, with 3 new rows for 2 ranks" in printed
    rows = table("cpu")["rows"]
    assert [row["world"] for row in rows] == [2, 2, 2, "any"]
    assert all(row["source"].startswith("tuned on 2x cpu, 20") for row in rows[:3])


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "cpu.json"
    options = ("--platform", "cpu", "--devices", "2", "--minutes", "0", "--out", str(out))
    done = subprocess.run(
        [sys.executable, "-m", "purlin_jax", "tune", *options],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "left as it was: all_reduce of 65536 bytes: no time was left" in done.stdout
    assert json.loads(out.read_text())["rows"] == table("cpu")["rows"]
