"""A policy table with rows that come of measurements, and how it is written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from purlin_jax.policy import Choice, row_of, table
from purlin_jax.table_check import check, unreached

Band = dict[str, Any]
Samples = dict[Choice, list[float]]  # microseconds of a call, round by round


@dataclass(frozen=True)
class Contest:
    """Ways to move `nbytes` from each rank to each peer, for one row of the table.

    Attributes:
      ops: the collectives of the row; the first of them is timed.
      nbytes: from one rank to a peer.
      choices: what the table takes so far, then the candidates.
    """

    ops: tuple[str, ...]
    nbytes: int
    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.ops)} of {self.nbytes} bytes"


def fastest(samples: Samples, least_win: float) -> Choice:
    """The table's choice, which comes first, or the fastest of those that beat it.

    To beat it takes less time by more than the fraction `least_win`, in three of four rounds.
    """
    own, *others = samples

    def beats(choice: Choice) -> bool:
        ratios = np.divide(samples[choice], samples[own])
        return bool(np.percentile(ratios, 75) < 1 - least_win)

    return min(filter(beats, others), key=lambda c: np.median(samples[c]), default=own)


def summary(contest: Contest, samples: Samples, least_win: float) -> str:
    """One line: median times of what the table takes and of the best other, and whether it won."""
    own, *others = samples
    best = fastest(samples, least_win)
    shown = best if best != own else min(others, key=lambda c: np.median(samples[c]))
    texts = [f"{_name(c)}, {np.median(samples[c]):.2f} us" for c in (own, shown)]
    verdict = " is beaten by " if best != own else " stays before "
    return f"{contest}: {verdict.join(texts)}"


def _name(choice: Choice) -> str:
    depth = f", depth {choice.depth}" if choice.depth else ""
    grid = f", {choice.blocks}x{choice.threads}" if choice.blocks else ""
    return f"{choice.regime} by {choice.atom}{grid}{depth}"


def spliced(
    old: Sequence[Band], won: Mapping[int, Band | None], sizes: Sequence[int]
) -> list[Band]:
    """Bands with the winner around each size that was measured, and the old ones elsewhere.

    Args:
      old: the bands so far.
      won: by measured size the winner, or None where the old band stays.
      sizes: all that were planned; the least and the largest stand for all beyond them. A winner
        reaches to the geometric mean with the next measured size, at most to twice its own.
    """
    known = sorted(won)
    spans: list[tuple[float, float, Band]] = []
    for below, size, above in zip([0, *known], known, [*known[1:], 0], strict=False):
        begin = max(size // 2, math.isqrt(below * size)) if size > min(sizes) else 0
        end = min(2 * size, math.isqrt(above * size) or 2 * size)
        if winner := won[size]:
            spans.append((begin, end if size < max(sizes) else math.inf, winner))
    limits = [(math.inf if b["up_to_bytes"] is None else b["up_to_bytes"], b) for b in old]
    ends = {end for end, _ in limits} | {cut for span in spans for cut in span[:2]} - {0}
    result: list[Band] = []
    reached = 0.0
    for limit in sorted(ends):
        so_far = next(band for end, band in limits if limit <= end)
        winners = (band for low, high, band in spans if low <= reached and limit <= high)
        band = {**next(winners, so_far), "up_to_bytes": None if limit == math.inf else int(limit)}
        if result and {**result[-1], "up_to_bytes": None} == {**band, "up_to_bytes": None}:
            result.pop()
        result.append(band)
        reached = limit
    return result


def tuned_rows(
    found: dict[str, Any],
    world: int,
    measured: Mapping[Contest, Samples],
    sizes: Sequence[int],
    least_win: float,
    source: str,
) -> list[dict[str, Any]]:
    """A row for each class of ops in which something beat the table `found`.

    Arguments as of fastest and spliced; `source` says where the figures come from.
    """
    rows = []
    for ops in dict.fromkeys(c.ops for c in measured):
        won: dict[int, Band | None] = {}
        for contest, samples in measured.items():
            if contest.ops == ops:
                best = fastest(samples, least_win)
                own = best == contest.choices[0]
                won[contest.nbytes] = None if own else _band(best, found["atom"])
        if any(won.values()):
            old = row_of(found, ops[0], world)["bands"]
            bands = spliced(old, won, sizes)
            rows.append({"world": world, "ops": list(ops), "source": source, "bands": bands})
    return rows


def _band(choice: Choice, usual_atom: str) -> Band:
    band: Band = {"up_to_bytes": None, "regime": choice.regime}
    band |= {"blocks": choice.blocks, "threads": choice.threads}
    band |= {"atom": choice.atom} if choice.atom != usual_atom else {}
    return band | ({"depth": choice.depth} if choice.depth else {})


def with_rows(found: dict[str, Any], arch: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The table of `arch` with `rows` before those of `found`, less what is no longer read."""
    everything = [*rows, *found["rows"]]
    dead = unreached(everything)
    kept = [row for i, row in enumerate(everything) if i not in dead]
    return {**found, "arch": arch, "rows": kept}


def as_text(found: dict[str, Any]) -> str:
    """JSON with one band a line, to be read and edited."""
    rows = []
    for row in found["rows"]:
        head = json.dumps({k: v for k, v in row.items() if k != "bands"})[:-1]
        bands = ",\n".join(f"    {json.dumps(band)}" for band in row["bands"])
        rows.append(f'  {head},\n   "bands": [\n{bands}\n   ]}}')
    head = "".join(f' "{k}": {json.dumps(v)},\n' for k, v in found.items() if k != "rows")
    return f'{{\n{head} "rows": [\n' + ",\n".join(rows) + "\n ]\n}\n"


def write(found: dict[str, Any], path: Path) -> None:
    """Put a table where `path` says, whole or not at all; ValueError if it is not one."""
    check(found)
    part = path.with_suffix(".part")
    part.write_text(as_text(found))
    part.replace(path)
    table.cache_clear()


def prepare_to_write(path: Path) -> None:
    """Make the folder of `path`, or end the program with advice, before minutes are spent."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(f"no permission to write in {path.parent}")
    except OSError as error:
        raise SystemExit(
            f"tune: {path} cannot be written ({error}); give --out FILE, or set PURLIN_POLICIES "
            "to a folder of yours"
        ) from error
