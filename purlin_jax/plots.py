"""Plots of time and of bandwidth on the wire by size, from the JSON of bench or benchmarks.kernels.

python -m purlin_jax.plots FILE.json [FILE.png]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# GB/s each way between two H200s while both ways are busy, measured (NVLink 4).
ROOFLINES = {"SM push 361": 361.0, "SM pull 335": 335.0}
STYLES = {
    ("kernel", "purlin"): "-o",
    ("kernel", "nccl"): "--s",
    ("jit", "purlin"): "-.^",
    ("jit", "lax"): ":v",
}


def wire_bytes(op: str, nbytes: int, world: int) -> float:
    """The least that each rank must send, which is also what it receives.

    `nbytes` is the input of each rank; of an all_gather it is the whole output.
    """
    return nbytes * (world - 1) / world * (2 if op == "all_reduce" else 1)


def wire_gbs(row: Row) -> float:
    return wire_bytes(row["op"], row["bytes"], row["devices"]) / row["us_median"] / 1e3


def rooflines(axes: Any) -> None:
    """Lines for what the wire gives, each way."""
    for name, gbs in ROOFLINES.items():
        axes.axhline(gbs, color="black", linestyle=":", linewidth=0.8)
        low = name.startswith("SM pull")
        axes.annotate(
            name,
            (0.01, gbs),
            xycoords=("axes fraction", "data"),
            va="top" if low else "bottom",
            fontsize=7,
        )


def figure(rows: Sequence[Row], path: Path) -> None:
    """One PNG: a column for each op, time above and bandwidth on the wire below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ops = list(dict.fromkeys(r["op"] for r in rows))
    grid, axes = plt.subplots(
        2, len(ops), figsize=(1 + 4.2 * len(ops), 8), sharex=True, sharey="row", squeeze=False
    )
    for column, op in enumerate(ops):
        time, wire = axes[:, column]
        kinds = dict.fromkeys((r["timing"], r["impl"]) for r in rows if r["op"] == op)
        for timing, impl in kinds:
            mine = sorted(
                (r for r in rows if (r["op"], r["timing"], r["impl"]) == (op, timing, impl)),
                key=lambda r: r["bytes"],
            )
            sizes = [r["bytes"] for r in mine]
            style = STYLES.get((timing, impl), "-")
            us = [r["us_median"] for r in mine]
            time.plot(sizes, us, style, markersize=3.5, label=f"{impl}, {timing}")
            wire.plot(sizes, [wire_gbs(r) for r in mine], style, markersize=3.5)
        time.set_title(op)
        time.legend(fontsize=8)
        if any(r["platform"] != "cpu" for r in rows):
            rooflines(wire)
        wire.set_xlabel("bytes")
        for panel in (time, wire):
            panel.set(xscale="log", yscale="log")
            panel.grid(True, which="major", alpha=0.3)
    axes[0, 0].set_ylabel("microseconds a call")
    axes[1, 0].set_ylabel("GB/s on the wire, each way")
    grid.tight_layout()
    grid.savefig(path, dpi=110)
    plt.close(grid)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("png", type=Path, nargs="?", help="default: beside the JSON")
    args = parser.parse_args()
    figure(json.loads(args.json.read_text())["rows"], args.png or args.json.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
