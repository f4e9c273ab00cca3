"""Rows of kernels alone: how they are asked for, merged and summed up, without a GPU."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import atom_sweep, kernels
from purlin_jax import __main__, bench, measure, plots

# Answers like the native programs: purlin takes 1 us per KiB, NCCL two or three times that.
FAKE = """#!{python}
import json, sys
name, options = {name!r}, sys.argv[1:]
if "--about" in options:
    about = {{"arch": "sm_90", "devices": 2, "device_kind": "Fake"}}
    print(json.dumps(about if name == "kernel_time" else {{"nccl": 22803}}))
    sys.exit()
print("a library says hello", flush=True)
for line in sys.stdin:
    op, *how, nbytes = line.split()
    nbytes = int(nbytes) // 8 * 8
    row = {{"op": op, "bytes": nbytes, "dtype": "float32", "devices": 2, "regime": "", "atom": ""}}
    row |= {{"blocks": 0, "threads": 0, "depth": 0, "variant": ""}}
    us = nbytes / 1024
    if name == "kernel_time":
        regime, atom, depth, blocks, threads = how
        row |= {{"impl": "purlin", "regime": regime, "atom": atom, "blocks": int(blocks)}}
        row["depth"] = int(depth)
    else:
        run = "".join(f" {{o[2:]}}" for o in options if o in ("--processes", "--unmixed"))
        row |= {{"impl": "nccl", "variant": how[0] + run}}
        us *= 2 if row["variant"] == "symmetric processes" else 3
    row |= {{"us_median": us, "us_p10": us, "us_p90": us, "algbw_gbs": nbytes / us / 1e3}}
    {fault}
    print(json.dumps(row), flush=True)
"""


@pytest.fixture
def native(tmp_path: Path) -> Path:
    for name in ("kernel_time", "nccl_time"):
        _fake(tmp_path, name, "")
    return tmp_path


def _fake(folder: Path, name: str, fault: str) -> None:
    program = folder / name
    program.write_text(FAKE.format(python=sys.executable, name=name, fault=fault))
    program.chmod(0o755)


def _setup(native: Path, **more: Any) -> kernels.Setup:
    return kernels.Setup(native, say=lambda text: None, **more)


def _row(op: str, nbytes: int, impl: str, us: float, timing: str = "kernel") -> dict[str, Any]:
    row: dict[str, Any] = {"op": op, "bytes": nbytes, "impl": impl, "us_median": us}
    row |= {"us_p10": us, "us_p90": us, "algbw_gbs": 1.0, "timing": timing, "regime": "packet"}
    return row | {"devices": 2, "platform": "cuda"}


def test_every_cell_has_a_row_of_each(native: Path) -> None:
    found = kernels.run(
        ["all_gather", "all_reduce"], [1024, 4096], ["purlin", "nccl"], _setup(native)
    )
    assert found.missing == []
    cells = [(r["op"], r["bytes"], r["impl"]) for r in found.rows]
    assert cells == [
        (op, nbytes, impl)
        for op in ("all_gather", "all_reduce")
        for nbytes in (1024, 4096)
        for impl in ("purlin", "nccl")
    ]
    for row in found.rows:
        assert (row["timing"], row["policy"], row["device_kind"]) == ("kernel", "default", "Fake")
        if row["impl"] == "nccl":
            assert row["variant"] == "symmetric processes"  # the fastest
            assert row["variants"].keys() == set(kernels.VARIANTS)
        else:
            assert row["regime"] in ("packet", "line", "zero_staging")


def test_regime_follows_the_policy_by_bytes_for_a_peer(native: Path) -> None:
    setup = _setup(native)
    for op, part in (("all_reduce", 1), ("all_gather", 2), ("all_to_all", 2)):
        line = kernels._ours(op, 4096, setup).split()
        choice = bench.chosen(setup.policy, op, "sm_90", 2, 4096)
        assert line[:2] == [op, choice.regime] and line[-1] == "4096"
        pair = bench.chosen(setup.policy, "all_reduce", "sm_90", 2, 4096 // part)
        assert choice == pair


def test_bytes_are_cut_to_whole_blocks() -> None:
    cut = [kernels.held_bytes(*given) for given in ((1024, 2), (1024, 3), (1030, 8))]
    assert cut == [1024, 1020, 1024]


def test_wire_bytes() -> None:
    assert plots.wire_bytes("all_reduce", 1024, 2) == 1024
    assert plots.wire_bytes("all_to_all", 1024, 2) == 512
    assert plots.wire_bytes("all_gather", 1024, 8) == 896  # of the whole output
    assert plots.wire_bytes("all_reduce", 1024, 8) == 1792


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("if nbytes == 4096: row = {'refused': 'too large'}", "too large"),
        ("if nbytes == 4096: sys.exit(3)", "ended with status 3"),
        ("if nbytes == 4096: import time; time.sleep(60)", "no answer within"),
        ("row['bytes'] += (nbytes == 4096)", "another cell"),
    ],
)
def test_missing_cells_are_named_and_the_others_stay(native: Path, fault: str, why: str) -> None:
    _fake(native, "kernel_time", fault)
    setup = _setup(native, timeout=3.0 if "sleep" in fault else 30.0, variants=("plain",))
    found = kernels.run(["all_reduce"], [1024, 4096, 8192], ["purlin", "nccl"], setup)
    assert [(r["bytes"], r["impl"]) for r in found.rows] == [
        (1024, "purlin"), (1024, "nccl"), (4096, "nccl"), (8192, "purlin"), (8192, "nccl"),
    ]  # fmt: skip
    (missing,) = found.missing
    assert missing.startswith("all_reduce 4096 purlin: ") and why in missing
    assert kernels.complain(found.missing) == 1 and kernels.complain([]) == 0


def test_a_variant_that_fails_is_missing_though_another_has_a_row(native: Path) -> None:
    _fake(native, "nccl_time", "if how[0] == 'plain': sys.exit(1)")
    setup = _setup(native, variants=("plain", "symmetric"), fresh=True)
    found = kernels.run(["all_reduce"], [1024], ["nccl"], setup)
    assert [r["variant"] for r in found.rows] == ["symmetric"]
    assert found.missing == ["all_reduce 1024 nccl plain: ended with status 1"]


def test_unknown_names_leave_no_cell_out_silently(native: Path) -> None:
    with pytest.raises(SystemExit, match="no variants"):
        _setup(native, variants=("plian",))
    for ops, impls in ((["all_reduse"], ["purlin"]), (["all_reduce"], ["ncll"])):
        with pytest.raises(SystemExit, match="nothing is known"):
            kernels.run(ops, [1024], impls, _setup(native))


def test_programs_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="PURLIN_BENCH=ON"):
        _setup(tmp_path)


def test_geometric_means_and_worst_cells() -> None:
    assert measure.geometric_mean([1, 4, 16]) == pytest.approx(4)
    rows = []
    for nbytes, ratio in ((1 << 10, 4.0), (1 << 20, 1.0), (2 << 20, 100.0), (4 << 20, 0.5)):
        rows += [
            _row("all_reduce", nbytes, "purlin", 10),
            _row("all_reduce", nbytes, "nccl", 10 * ratio),
        ]
        rows.append(_row("all_reduce", nbytes, "lax", 1, "jit"))
    small, large = measure.against_nccl(rows).splitlines()
    assert "2.000 times NCCL (geometric mean of 2), worst 1.000: all_reduce of 1048576" in small
    assert "0.500 times NCCL (geometric mean of 1), worst 0.500: all_reduce of 4194304" in large


def test_table_compares_rows_of_one_timing() -> None:
    rows = [
        _row("all_reduce", 1024, "purlin", 10, "jit"),
        _row("all_reduce", 1024, "lax", 20, "jit"),
        _row("all_reduce", 1024, "purlin", 2),
        _row("all_reduce", 1024, "nccl", 3) | {"regime": "", "variant": "symmetric"},
    ]
    _, jit, lax, kernel, nccl = bench.table(rows).splitlines()
    assert jit.endswith("2.00 lax") and kernel.endswith("1.50 nccl")
    assert lax.endswith("1.00") and nccl.endswith("1.00") and "symmetric" in nccl


def test_kernels_writes_one_json(native: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    options = ("--build", str(native), "--sizes", "1K", "--ops", "all_reduce", "--json", str(out))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernels", *options],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["header"]["missing"] == [] and report["header"]["nccl"] == 22803
    assert [r["impl"] for r in report["rows"]] == ["purlin", "nccl"]
    assert "2.000 times NCCL" in done.stdout


def test_nccl_without_its_programs_says_what_to_do() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "purlin_jax", "bench", "--against", "lax,nccl"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0 and "--native DIR" in done.stderr


def test_bench_takes_kernel_rows_of_a_forced_regime(native: Path) -> None:
    asked = argparse.Namespace(
        native=native, platform=None, dtype="float32", policy="zero_staging", devices=2
    )
    rows, about, missing = __main__._kernels(["all_reduce"], [1024], ["lax", "nccl"], asked)
    assert missing == [] and about["nccl"] == 22803
    assert [(r["impl"], r["policy"]) for r in rows] == [
        ("purlin", "zero_staging"), ("nccl", "default"),
    ]  # fmt: skip
    assert rows[0]["regime"] == "zero_staging"
    (row,) = __main__._kernels(["all_reduce"], [1024], [], asked)[0]
    assert row["impl"] == "purlin"
    asked.platform = "cpu"
    with pytest.raises(SystemExit, match="on GPUs alone"):
        __main__._kernels(["all_reduce"], [1024], ["nccl"], asked)


def test_plots(tmp_path: Path) -> None:
    rows = [
        _row(op, nbytes, impl, 1 + nbytes / 1e5, timing)
        for op in ("all_reduce", "all_to_all")
        for nbytes in (1024, 1 << 20)
        for timing, impl in plots.STYLES
    ]
    plots.figure(rows, tmp_path / "rows.png")
    swept = [
        _row(op, 1 << 28, "purlin", 1000 / blocks)
        | {"regime": regime, "atom": "hopper", "blocks": blocks, "depth": depth}
        for op, regime in atom_sweep.SITUATIONS
        for blocks in (1, 2)
        for depth in (1, 8)
    ]
    atom_sweep.plot(swept, tmp_path / "sweep.png")
    pngs = [(tmp_path / name).read_bytes()[1:4] for name in ("rows.png", "sweep.png")]
    assert pngs == [b"PNG"] * 2


def test_the_sweep_takes_the_atoms_that_the_gpu_has() -> None:
    lines = [line.split() for line in atom_sweep.configurations("sm_90", 1 << 28, [1, 32])]
    assert {line[2] for line in lines} == {"generic", "ampere", "hopper"}
    assert len(lines) == len({tuple(line) for line in lines}) == 5 * 2 * (1 + 3 + 8)
    asked = list(atom_sweep.configurations("sm_80", 1 << 28, [8], [5]))
    assert len(asked) == 5 * 2 and asked[1] == "all_to_all zero_staging ampere 5 8 0 268435456"
