"""Whether data is a policy table, and what is wrong with it if not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from purlin_jax import _native

PACKAGED = resources.files("purlin_jax").joinpath("policies")  # the package's tables
# The Atom that runs on every GPU, and those of the tables.
ATOMS = ("generic", *sorted({json.loads(f.read_text())["atom"] for f in PACKAGED.iterdir()}))
FLAGGED = ("packet", "line")  # data and flags travel in words of eight bytes
LIMITS = {"blocks": (64, 1), "threads": (512, 32), "depth": (8, 1)}  # the most, a multiple of

_TABLE = {"arch": str, "atom": str, "regimes": list, "rows": list}
_ROW = {"world": (int, str), "source": str, "bands": list}
_BAND = {"up_to_bytes": (int, type(None)), "regime": str, "blocks": int, "threads": int}


def outside(name: str, value: Any) -> str:
    """What is wrong with `value` as one of LIMITS; empty if nothing is."""
    most, unit = LIMITS[name]
    if 0 <= value <= most and value % unit == 0:
        return ""
    multiple = f", or no multiple of {unit}" if unit > 1 else ""
    return f"{name}={value} is outside 0 to {most}{multiple}"


def check(found: Any) -> None:
    """Raise ValueError, with a sentence on what is wrong, unless `found` is a policy table."""
    _fields("the table", found, _TABLE)
    _known("the table", "Atom", found["atom"], ATOMS)
    for regime in found["regimes"]:
        _known("the table", "regime", regime, tuple(_native.regimes))
    for i, row in enumerate(found["rows"], 1):
        _check_row(f"row {i}", row, found["regimes"])
    for i in unreached(found["rows"]):
        raise ValueError(f"row {i + 1} is never read, since rows before it have its world and ops")
    for op in _native.collectives:
        _check_ends(found, op)


def unreached(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Numbers of the rows that no call reads, since earlier ones fit each op of their world."""
    taken: set[tuple[Any, str]] = set()
    found = []
    for i, row in enumerate(rows):
        mine = {(row["world"], op) for op in row.get("ops", _native.collectives)}
        if all(pair in taken or ("any", pair[1]) in taken for pair in mine):
            found.append(i)
        taken |= mine
    return found


def _check_row(where: str, row: Any, regimes: Sequence[str]) -> None:
    _fields(where, row, _ROW, {"ops": list})
    world = row["world"]
    if world != "any" and (isinstance(world, str) or world < 1):
        raise ValueError(f'{where} has world {world!r}, which is neither a number nor "any"')
    for op in row.get("ops", ()):
        _known(where, "op", op, tuple(_native.collectives))
    limits = []
    for i, band in enumerate(row["bands"], 1):
        here = f"{where}, band {i}"
        _fields(here, band, _BAND, {"atom": str, "depth": int, "packet_bytes": int})
        _known(here, "regime", band["regime"], regimes)
        _known(here, "Atom", band.get("atom", ATOMS[0]), ATOMS)
        for name in LIMITS:
            if why := outside(name, band.get(name, 0)):
                raise ValueError(f"{here}: {why}")
        limits.append(band["up_to_bytes"])
    if not limits or limits[-1] is not None:
        raise ValueError(f"{where} does not end in a band whose up_to_bytes is null")
    sizes = [-1 if n is None else n for n in limits[:-1]]
    if any(a >= b for a, b in zip([0, *sizes], sizes, strict=False)):
        raise ValueError(f"{where}: up_to_bytes does not grow from band to band")


def _check_ends(found: dict[str, Any], op: str) -> None:
    """Every call must find a band, whatever its world, size and elements."""
    rows = [(i, r) for i, r in enumerate(found["rows"], 1) if op in r.get("ops", (op,))]
    if all(row["world"] != "any" for _, row in rows):
        raise ValueError(f'no row is for {op} in world "any"')
    seen = set()
    for i, row in rows:
        if row["world"] in seen or "any" in seen:
            continue
        seen.add(row["world"])
        last = row["bands"][-1]["regime"]
        if last in FLAGGED or op not in _native.regimes[last][0]:
            raise ValueError(f"row {i}: its last band is {last!r}, which does not fit every {op}")


def _known(where: str, what: str, name: Any, known: Sequence[str]) -> None:
    if name not in known:
        raise ValueError(f"{where} has an unknown {what} {name!r}; take one of {tuple(known)}")


def _fields(
    where: str, found: Any, needed: dict[str, Any], optional: dict[str, Any] | None = None
) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"{where} is not an object with fields, but {found!r}")
    known = needed | (optional or {})
    if missing := [name for name in needed if name not in found]:
        raise ValueError(f"{where} has no {missing[0]!r}")
    for name, value in found.items():
        if name not in known:
            raise ValueError(f"{where} has an unknown field {name!r}; take one of {tuple(known)}")
        if not isinstance(value, known[name]) or isinstance(value, bool):
            raise ValueError(f"{where}: {name}={value!r} has the wrong type")
