"""The command line: status, selftest and bench, and that bench times nothing that is not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from purlin_jax import __main__, bench, measure, selftest
from purlin_jax.policy import Policy
from tests.harness import mesh

ROW = {
    "op", "platform", "device_kind", "devices", "bytes", "dtype", "impl", "policy", "timing",
    "regime", "atom", "us_median", "us_p10", "us_p90", "algbw_gbs",
}  # fmt: skip


def _cli(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "purlin_jax", *args, "--platform", "cpu", "--devices", "4"],
        capture_output=True,
        text=True,
        timeout=300,
    )


def _setup() -> bench.Setup:
    return bench.Setup(mesh=mesh(4, ("i",)), dtype=jnp.float32, policy=Policy(), samples=2)


@pytest.mark.parametrize(("text", "size"), [("16", 16), ("4K", 4096), ("1m", 1 << 20)])
def test_sizes(text: str, size: int) -> None:
    assert bench.parse_size(text) == size


def test_bad_size() -> None:
    with pytest.raises(ValueError, match="1X"):
        bench.parse_size("1X")


@pytest.mark.parametrize("op", list(bench.OPS))
@pytest.mark.parametrize("impl", ["purlin", "lax"])
def test_programs_hold_what_is_timed(op: str, impl: str) -> None:
    assert bench.prepare(op, impl, 1024, _setup())() > 0


@pytest.mark.parametrize("impl", ["purlin", "lax"])
def test_emptied_programs_are_refused(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.OPS["all_reduce"], impl, lambda x: x)
    with pytest.raises(measure.EmptiedError, match="nothing to time"):
        bench.prepare("all_reduce", impl, 1024, _setup())


def test_status() -> None:
    result = _cli("status")
    assert result.returncode == 0, result.stderr
    for word in (
        "FFI API",
        "compiler: ",
        "devices: 4 x cpu",
        "CUDA: ",
        "policy cpu",
        "from the package: ",
    ):
        assert word in result.stdout


def test_selftest() -> None:
    result = _cli("selftest")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 failed" in result.stdout and "FAIL:" not in result.stdout
    heading, *rows, _ = result.stdout.splitlines()
    assert heading.split() == ["op", "regime", "dtype", "items", "us", "times", "lax"]
    for row in rows:
        op, _regime, _dtype, _items, us, times_lax, verdict = row.split()
        assert op in bench.OPS and verdict == "PASS"
        assert float(us) > 0 and float(times_lax) > 0


def test_selftest_times_no_collective_of_lax_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(bench.OPS["all_to_all"], "lax", lambda x: x)  # as XLA leaves it on one GPU
    taken = selftest._time("all_to_all", ["meet"], jnp.float32, 8, mesh(4, ("i",)))
    assert list(taken) == ["meet"] and taken["meet"] > 0


def test_bench_in_processes(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    where = ("--processes", "2", "--json", str(out))
    result = _cli("bench", *where, "--sizes", "1K", "--ops", "all_reduce", "--samples", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    ours, lax = json.loads(out.read_text())["rows"]
    assert (ours["impl"], lax["impl"]) == ("purlin", "lax") and ours["devices"] == 4
    assert ours["regime"] == "packet" and result.stdout.count("all_reduce") == 2


def test_bench_writes_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    options = ("--sizes", "1K", "--ops", "all_reduce", "--samples", "3", "--json", str(out))
    result = _cli("bench", *options)
    assert result.returncode == 0, result.stderr
    report = json.loads(out.read_text())
    assert {"date", "commit", "dirty", "jax", "xla_flags", "samples"} <= report["header"].keys()
    assert [r["impl"] for r in report["rows"]] == ["purlin", "lax"]
    for row in report["rows"]:
        assert row.keys() == ROW
        assert 0 < row["us_p10"] <= row["us_median"] <= row["us_p90"]
    assert report["rows"][0]["regime"] == "meet" and report["rows"][0]["policy"] == "default"


@pytest.mark.parametrize(
    ("option", "given", "says"),
    (
        ("--ops", "psum", "no 'psum'; take some of all_gather,"),
        ("--against", "torch", "no 'torch'; take some of lax,nccl"),
        ("--sizes", "1X", "a size is a number with K, M or G after it"),
        ("--dtype", "float33", "no dtype 'float33'"),
        ("--samples", "0", "'0' is no number of 1 or more"),
        ("--devices", "-1", "'-1' is no number of 1 or more"),
    ),
)
def test_options_that_are_wrong(
    option: str, given: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["purlin_jax", "bench", f"{option}={given}"])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_bench_of_a_regime_that_some_ops_lack() -> None:
    options = ("--sizes", "1K", "--samples", "1", "--against=", "--policy", "composed")
    result = _cli("bench", *options)
    assert result.returncode == 0, result.stderr
    assert "all_reduce" in result.stdout and "reduce_scatter" not in result.stdout
    refused = _cli("bench", *options, "--ops", "all_reduce,all_gather")
    assert refused.returncode == 1
    assert "--policy composed is for all_reduce, and not for all_gather" in refused.stderr
