"""The benchmark programs run at tiny sizes, write what they print, and refuse what was emptied."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import common
from purlin_jax import measure

ROOT = Path(__file__).parents[1]
HEADER = {"date", "commit", "dirty", "purlin_jax", "jax", "jaxlib", "xla_flags", "samples", "step"}


def _rows(tmp_path: Path, program: str, *options: str) -> list[dict[str, Any]]:
    """The rows of a benchmark on 8 virtual CPU devices, checked for what all of them hold."""
    out = tmp_path / "rows.json"
    tiny = ("--platform", "cpu", "--devices", "8", "--samples", "2", "--json", str(out))
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{program}", *tiny, *options],
        cwd=ROOT,
        # Most of the time goes into compilation, and what is compiled runs for milliseconds.
        env={**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["header"].keys() == HEADER
    assert len(done.stdout.splitlines()) == 1 + len(found["rows"])
    for row in found["rows"]:
        assert row["devices"] == 8
        assert 0 < row["us_p10"] <= row["us_median"] <= row["us_p90"]
    return found["rows"]


def test_ulysses_exchange(tmp_path: Path) -> None:
    options = ("--sequences", "16", "--heads", "8", "--dim", "4", "--layers", "2")
    rows = _rows(tmp_path, "ulysses_exchange", *options)
    assert [(r["layout"], r["impl"]) for r in rows] == [
        (layout, impl) for layout in ("BSHD", "BHSD") for impl in ("lax", "purlin", "alone")
    ]
    # 4 arrays of 2 positions, 8 heads of 4 values and 2 bytes, of which one eighth stays.
    assert [r["wire_bytes"] for r in rows] == [448, 448, 0] * 2
    assert [r["regimes"] for r in rows] == ["", "meet", ""] * 2
    assert all(r["times_lax"] > 0 for r in rows if r["impl"] == "purlin")


def test_mmdit_block(tmp_path: Path) -> None:
    rows = _rows(tmp_path, "mmdit_block", "--small", "--images", "64", "--blocks", "1")
    assert [r["impl"] for r in rows] == ["lax", "purlin", "alone", "one device"]
    lax, ours, alone, one = rows
    assert lax["error_image"] < 1e-5 and ours["error_image"] < 1e-5
    # What is exchanged matters for the values, so an error would be seen.
    assert alone["error_image"] > 0.1 and alone["error_text"] > 0.1
    assert "error_image" not in one


def test_beside(tmp_path: Path) -> None:
    options = ("--flags", "default,scheduler", "--ops", "all_to_all", "--sizes", "8K")
    loops = ("--scan-steps", "2", "--overlap-steps", "2", "--overlap-width", "16")
    rows = _rows(tmp_path, "beside", *options, *loops)
    three = [("overlap", i) for i in ("lax", "purlin", "alone")]
    three += [("scan", i) for i in ("lax", "purlin", "alone")]
    expected = [("call", i) for i in ("lax", "purlin")] + three
    for flags in ("default", "scheduler"):
        mine = [r for r in rows if r["flags"] == flags]
        assert [(r["situation"], r["impl"]) for r in mine] == expected
        assert all(("scheduler" in r["xla_flags"]) == (flags == "scheduler") for r in mine)
    assert all(
        (r["impl"] == "purlin" and r["flags"] == "default") == ("times_best_lax" in r) for r in rows
    )


def test_an_emptied_program_has_no_figures(capsys: pytest.CaptureFixture[str]) -> None:
    def emptied() -> measure.Sampler:
        measure.require_collectives("ENTRY main { }", "all_to_all", "lax", 2)
        raise AssertionError("was not refused")

    found = common.timed({"lax": emptied, "purlin": lambda: lambda: 1.0}, 3)
    assert found["purlin"]["us_median"] == 1.0 and found["lax"].keys() == {"refused"}
    args = common.parser("").parse_args([])
    rows = [{"impl": name, **row} for name, row in found.items()]
    assert common.report(rows, ("impl", "us_median"), "", args) == 1
    printed = capsys.readouterr().out.splitlines()
    assert "nothing to time" in printed[1] and "refused" not in printed[2]


def test_different_bits_are_seen() -> None:
    tree = {"a": np.zeros(3, np.float32)}
    assert common.same_bits(tree, tree)
    assert not common.same_bits(tree, {"a": -tree["a"]})


def test_varlen(tmp_path: Path) -> None:
    rows = _rows(tmp_path, "varlen", "--sizes", "1K", "--kinds", "zipf_1")
    assert [(r["op"], r["impl"]) for r in rows] == [
        (op, impl)
        for op in ("all_gather_v", "reduce_scatter_v", "all_to_all_v")
        for impl in ("lax", "purlin")
    ]
    assert [r["regimes"] for r in rows] == ["", "meet"] * 3
    assert {r["largest"] for r in rows} == {11}  # of 16 rows of 64 bytes for 8 ranks
