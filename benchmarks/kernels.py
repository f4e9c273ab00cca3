"""Kernels alone, in graphs of dependent calls: purlin with its default policy, and NCCL's best.

    python -m benchmarks.kernels --build DIR [--json FILE]

DIR holds kernel_time and nccl_time (CMakeLists.txt with -DPURLIN_BENCH=ON). Every program stays
alive and waits for its turn, so that neighbours in a table were measured one after another.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.native_programs import NoFiguresError, Program, ask_about, visible
from purlin_jax import bench, measure
from purlin_jax.policy import Policy

Row = dict[str, Any]
STEP = "graphs of 200 calls (fewer above 4 MiB, at least 10), one after another"
SIZES = "1K,2K,4K,8K,16K,32K,64K,128K,256K,512K,1M,2M,4M,8M,16M,64M,256M,1G"
# NCCL's ways to run: a name, options of nccl_time, and the mode of its buffers.
RUNS = {
    "": (),
    " processes": ("--processes",),
    " processes unmixed": ("--processes", "--unmixed"),
}
MODES = ("plain", "symmetric")
VARIANTS = tuple(mode + run for run in RUNS for mode in MODES)


@dataclass
class Found:
    """Rows, and the cells that have none, each with its reason."""

    rows: list[Row] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def held_bytes(nbytes: int, world: int) -> int:
    """What of `nbytes` is timed: whole float32 blocks, one for each rank.

    `nbytes` is the input of each rank, and of an all_gather the whole output, so all ops are cut
    in the same way.
    """
    return nbytes // 4 // world * world * 4


def best(rows: Sequence[Row]) -> Row:
    """NCCL's fastest variant, with the medians of all of them beside it."""
    medians = {r["variant"]: r["us_median"] for r in rows}
    return {**min(rows, key=lambda r: r["us_median"]), "variants": medians}


@dataclass
class Setup:
    """What all cells share."""

    build: Path
    policy: Policy = field(default_factory=Policy)
    samples: int = 21
    variants: Sequence[str] = VARIANTS
    devices: int | None = None
    fresh: bool = False  # programs end after each cell, so none is idle beside another
    timeout: float = 120.0  # seconds for a cell, the start of its program included
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)

    def __post_init__(self) -> None:
        if unknown := set(self.variants) - set(VARIANTS):
            raise SystemExit(f"no variants {sorted(unknown)}; take some of {VARIANTS}")
        self.env = visible(self.devices)
        self.about = ask_about(self.build / "kernel_time", self.env)

    def program(self, name: str, most: int, *options: str) -> Program:
        limits = ("--rows", "--samples", str(self.samples), "--most", str(most))
        return Program([str(self.build / name), *limits, *options], self.env, self.timeout)


def run(ops: Sequence[str], sizes: Sequence[int], impls: Sequence[str], setup: Setup) -> Found:
    """One row for each op, size and implementation of `impls` ("purlin", "nccl")."""
    if unknown := set(impls) - {"purlin", "nccl"} | set(ops) - bench.OPS.keys():
        raise SystemExit(f"nothing is known of {sorted(unknown)}")
    most = max(sizes)
    ours = setup.program("kernel_time", most)
    names = [v for v in setup.variants if "nccl" in impls]
    theirs = {
        run: setup.program("nccl_time", most, *options)
        for run, options in RUNS.items()
        if any(mode + run in names for mode in MODES)
    }
    found = Found()
    try:
        for nbytes in sizes:
            for op in ops:
                if "purlin" in impls:
                    line = _ours(op, nbytes, setup)
                    found.rows += _cell([(ours, line, "")], "purlin", op, nbytes, setup, found)
                asks = [
                    (program, f"{op} {mode} {nbytes}", mode + run)
                    for run, program in theirs.items()
                    for mode in MODES
                    if mode + run in names
                ]
                if asks:
                    found.rows += _cell(asks, "nccl", op, nbytes, setup, found)
    finally:
        for program in (ours, *theirs.values()):
            program.close()
    order = {op: i for i, op in enumerate(ops)}
    found.rows.sort(key=lambda r: order[r["op"]])  # stable, so sizes stay as they were taken
    return found


def _ours(op: str, nbytes: int, setup: Setup) -> str:
    about = setup.about
    c = bench.chosen(setup.policy, op, about["arch"], about["devices"], nbytes)
    return f"{op} {c.regime} {c.atom} {c.depth} {c.blocks} {c.threads} {nbytes}"


def _cell(
    asks: Sequence[tuple[Program, str, str]],
    impl: str,
    op: str,
    nbytes: int,
    setup: Setup,
    found: Found,
) -> list[Row]:
    """The row of one cell, or none and an entry in found.missing for each variant without one."""
    taken = []
    for program, line, variant in asks:
        name = " ".join(filter(None, (op, str(nbytes), impl, variant)))
        try:
            row = program.ask(line)
            if setup.fresh:
                program.close()
            if "refused" in row:
                raise NoFiguresError(row["refused"])
            expected = (op, held_bytes(nbytes, setup.about["devices"]), impl, variant)
            if tuple(row[k] for k in ("op", "bytes", "impl", "variant")) != expected:
                raise NoFiguresError(
                    f"{' '.join(program.command)} answered with another cell: {row}"
                )
            taken.append(row)
            setup.say(f"{name}: {row['us_median']} us")
        except NoFiguresError as error:
            found.missing.append(f"{name}: {error}")
            setup.say(found.missing[-1])
    if not taken:
        return []
    row = best(taken) if impl == "nccl" else taken[0]
    forced = impl == "purlin" and setup.policy != Policy()
    return [
        {
            **row,
            "platform": "cuda",
            "device_kind": setup.about["device_kind"],
            "policy": setup.policy.regime if forced else "default",
            "timing": "kernel",
        }
    ]


def header(setup: Setup, impls: Sequence[str]) -> Row:
    """What is needed to read kernel rows later, beside measure.header's."""
    more: Row = {"kernel_step": STEP, "kernel_samples": setup.samples}
    if "nccl" in impls:
        more |= ask_about(setup.build / "nccl_time", setup.env)
    return more


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, required=True, help="folder of the native programs")
    parser.add_argument("--ops", default=",".join(bench.OPS))
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--impls", default="purlin,nccl")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="NCCL's, to choose from")
    parser.add_argument("--devices", type=int, help="how many; default: all")
    parser.add_argument("--samples", type=int, default=21)
    parser.add_argument("--fresh", action="store_true", help="start a program for each cell")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    impls = args.impls.split(",")
    setup = Setup(
        args.build,
        samples=args.samples,
        variants=args.variants.split(","),
        devices=args.devices,
        fresh=args.fresh,
    )
    sizes = [bench.parse_size(s) for s in args.sizes.split(",")]
    found = run(args.ops.split(","), sizes, impls, setup)
    print(bench.table(found.rows))
    print(measure.against_nccl(found.rows))
    if args.json:
        about = measure.header(args.samples, STEP) | header(setup, impls)
        report = {"header": about | {"missing": found.missing}, "rows": found.rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return complain(found.missing)


def complain(missing: Sequence[str]) -> int:
    """Name the cells that have no figures; the exit status."""
    for cell in missing:
        print(f"MISSING {cell}", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
