"""What the benchmark programs share: options, devices, the exchange left out, rows and tables."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import purlin_jax as purlin
from purlin_jax import measure

AXIS = "i"  # the name that the collectives of purlin_jax.bench use
LIBRARIES = {"lax": jax.lax, "purlin": purlin}
Row = dict[str, Any]


def parser(doc: str | None, samples: int = 15) -> argparse.ArgumentParser:
    """A parser with the options that all programs have."""
    found = argparse.ArgumentParser(description=doc)
    found.add_argument("--platform", choices=("cpu", "gpu"), help="default: what jax takes")
    found.add_argument("--devices", type=int, help="how many; default: all (8 on the CPU)")
    found.add_argument("--samples", type=int, default=samples)
    found.add_argument("--json", type=Path, help="write header and rows to this file, too")
    return found


def numbers(text: str) -> list[int]:
    """Integers of a comma list, for argparse."""
    return [int(n) for n in text.split(",")]


def mesh(args: argparse.Namespace) -> Mesh:
    return Mesh(np.array(measure.devices(args.platform, args.devices)), (AXIS,))


def libraries(mesh: Mesh) -> list[str]:
    """Who exchanges, in the order of measuring.

    XLA drops its own collectives on one device, so nothing of jax.lax is left to measure there.
    """
    return ["lax", "purlin"] if mesh.size > 1 else ["purlin"]


def place(mesh: Mesh) -> Row:
    """The columns that say where something ran."""
    device = mesh.devices.flat[0]
    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": mesh.size,
    }


def unexchanged(x: jax.Array, split: int, concat: int, world: int) -> jax.Array:
    """x in the shape that an all_to_all would give it, with nothing sent: the values are wrong.

    The barrier keeps what comes before and after in kernels of their own, as an exchange does.
    XLA honours it on GPUs; on CPUs it takes barriers out before it fuses.
    """
    shape = list(x.shape)
    shape[split] //= world
    shape[concat] *= world
    return jax.lax.optimization_barrier(x.reshape(shape))


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees of arrays hold the same bytes."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        np.array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8)) for x, y in pairs
    )


def run_noting_regimes(f: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """The results of f, and the regimes that purlin's native code ran for them."""
    before = purlin.native_regimes()
    results = jax.block_until_ready(f(*args))
    after = purlin.native_regimes()
    ran = {key[1] for key, calls in after.items() if calls > before.get(key, 0)}
    return results, ",".join(sorted(ran))


def timed(programs: Mapping[str, Callable[[], measure.Sampler]], samples: int) -> dict[str, Row]:
    """Figures of each program, taken in turns; "refused" instead for one that was emptied."""
    samplers: dict[str, measure.Sampler] = {}
    found: dict[str, Row] = {}
    for name, prepare in programs.items():
        found[name] = {}
        try:
            samplers[name] = prepare()
        except measure.EmptiedError as error:
            found[name] = {"refused": str(error)}
    taken = measure.interleaved(list(samplers.values()), samples)
    for name, us in zip(samplers, taken, strict=True):
        found[name] = measure.spread(us)
    return found


def times_lax(lax: Row | None, mine: Row) -> float | None:
    """How many times faster than jax.lax, where both have figures."""
    if lax is None or lax is mine or "us_median" not in lax or "us_median" not in mine:
        return None
    return round(lax["us_median"] / mine["us_median"], 3)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        # Four digits; small ones, such as errors, with an exponent.
        return f"{value:.3g}" if 0 < abs(value) < 0.01 else f"{value:.{_decimals(value)}f}"
    return str(value)


def _decimals(value: float) -> int:
    return max(0, 3 - int(math.log10(abs(value)))) if abs(value) >= 1 else 3


def _reason(row: Row) -> str:
    return "".join(f"  {key}: {row[key]}" for key in ("refused", "note") if key in row)


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Rows as text, the columns by name; why there are no figures at the end of its line."""
    cells = [list(columns), *([_cell(r.get(c)) for c in columns] for r in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    notes = ["", *(_reason(r) for r in rows)]
    return "\n".join(
        "  ".join(f"{cell:>{w}}" for cell, w in zip(line, widths, strict=True)) + note
        for line, note in zip(cells, notes, strict=True)
    )


def report(rows: Sequence[Row], columns: Sequence[str], step: str, args: argparse.Namespace) -> int:
    """Print the rows, write them if asked to, and return the exit status: 1 if any was refused."""
    print(table(rows, columns), flush=True)
    if args.json:
        found = {"header": measure.header(args.samples, step), "rows": list(rows)}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any("refused" in r for r in rows))
