"""What each Atom gets out of the wire, by CTAs and by depth of its ring, at one large size.

    python -m benchmarks.atom_sweep --build DIR --json FILE [--plot FILE.png]

An all_to_all pulled, pushed and staged, and an all_reduce pulled and staged, all by kernel_time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import numbers
from benchmarks.kernels import Setup, complain
from benchmarks.native_programs import NoFiguresError
from purlin_jax import bench, measure
from purlin_jax.plots import rooflines, wire_gbs

Row = dict[str, Any]
SITUATIONS = (
    ("all_to_all", "zero_staging"),
    ("all_to_all", "zero_staging_push"),
    ("all_to_all", "staged"),
    ("all_reduce", "zero_staging"),
    ("all_reduce", "staged"),
)
NAMES = {"zero_staging": "pull", "zero_staging_push": "push", "staged": "staged"}
# Depths that differ; an Atom without a ring has one. Ampere's has 2, 4 or 8 slots.
DEPTHS = {
    "generic": (0,),
    "ampere": (2, 4, 8),
    "hopper": (1, 2, 3, 4, 5, 6, 7, 8),
    "blackwell": (1, 2, 3, 4, 5, 6, 7, 8),
}
LEAST = {"generic": 75, "ampere": 80, "hopper": 90, "blackwell": 100}  # compute capability


def configurations(
    arch: str, nbytes: int, blocks: Sequence[int], depths: Sequence[int] | None = None
) -> Iterator[str]:
    """Lines for kernel_time; `depths` replaces those of every Atom that has a ring."""
    capability = int(arch.removeprefix("sm_"))
    for op, regime in SITUATIONS:
        for atom, own in DEPTHS.items():
            if LEAST[atom] > capability:
                continue
            for depth in own if depths is None or own == (0,) else depths:
                for n in blocks:
                    yield f"{op} {regime} {atom} {depth} {n} 0 {nbytes}"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Bandwidth on the wire: by CTAs at the best depth above, by depth at the best CTAs below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shape = (2, len(SITUATIONS))
    grid, axes = plt.subplots(*shape, figsize=(20, 8), sharey=True, squeeze=False)
    for column, (op, regime) in enumerate(SITUATIONS):
        for atom in dict.fromkeys(r["atom"] for r in rows):
            key = (op, regime, atom)
            mine = [r for r in rows if (r["op"], r["regime"], r["atom"]) == key]
            for panel, by in zip(axes[:, column], ("blocks", "depth"), strict=True):
                best: dict[int, float] = {}
                for r in mine:
                    best[r[by]] = max(best.get(r[by], 0.0), wire_gbs(r))
                points = sorted(best.items())
                panel.plot([x for x, _ in points], [y for _, y in points], "-o", label=atom)
        axes[0, column].set(title=f"{op}, {NAMES[regime]}", xlabel="CTAs", xscale="log")
        axes[0, column].set_xscale("log", base=2)
        axes[1, column].set_xlabel("depth (0: no ring)")
        for panel in axes[:, column]:
            panel.grid(True, alpha=0.3)
            rooflines(panel)
    axes[0, 0].legend()
    for panel in axes[:, 0]:
        panel.set_ylabel("GB/s on the wire, each way")
    grid.tight_layout()
    grid.savefig(path, dpi=110)
    plt.close(grid)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, required=True, help="folder of kernel_time")
    parser.add_argument("--size", default="256M")
    parser.add_argument("--blocks", type=numbers, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--depths", type=numbers, help="default: all that differ")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    setup = Setup(args.build, samples=args.samples)
    nbytes = bench.parse_size(args.size)
    program = setup.program("kernel_time", nbytes)
    rows: list[Row] = []
    missing: list[str] = []
    for line in configurations(setup.about["arch"], nbytes, args.blocks, args.depths):
        try:
            row = program.ask(line)
            if "refused" in row:
                raise NoFiguresError(row["refused"])
            rows.append(row | {"device_kind": setup.about["device_kind"], "timing": "kernel"})
            setup.say(f"{line}: {row['us_median']} us, {wire_gbs(row):.1f} GB/s on the wire")
        except NoFiguresError as error:
            missing.append(f"{line}: {error}")
            setup.say(missing[-1])
    program.close()
    header = measure.header(args.samples, "graphs of dependent calls") | {"missing": missing}
    args.json.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)
    return complain(missing)


if __name__ == "__main__":
    sys.exit(main())
