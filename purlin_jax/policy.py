"""The choice of a regime and its knobs, from tables that are data."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Self

import jax

from purlin_jax import _native

REGIMES = ("auto", *_native.regimes)


@dataclass(frozen=True)
class Policy:
    """What a caller forces; the rest is read from the table of the architecture.

    Attributes:
      regime: one of REGIMES; "auto" leaves it to the table.
      blocks: blocks of each rank's kernel, 1 to 64; 0 leaves it to the table.
      atom: of a GPU's kernels: "generic", "ampere", "hopper", "blackwell"; "" leaves it to the
        table.
      depth: stages of the Atom's ring in shared memory, 1 to 8; 0 leaves it to the table.
      staging_bytes: what a call may use of one half of the staging ("staged" and "composed"); 0
        for all of it. More rounds where data does not fit.
    """

    regime: str = "auto"
    blocks: int = 0
    staging_bytes: int = 0
    atom: str = ""
    depth: int = 0

    def __post_init__(self) -> None:
        if self.regime not in REGIMES:
            raise ValueError(f"purlin.policy: no regime {self.regime!r}; take one of {REGIMES}")
        if not 0 <= self.blocks <= 64:
            raise ValueError(f"purlin.policy: blocks={self.blocks} is outside 0 to 64")
        if self.staging_bytes < 0:
            raise ValueError(f"purlin.policy: staging_bytes={self.staging_bytes} is negative")


_context = jax.make_user_context(None)  # part of the cache key of jax.jit


@contextmanager
def policy(
    regime: str = "auto",
    *,
    blocks: int = 0,
    staging_bytes: int = 0,
    atom: str = "",
    depth: int = 0,
) -> Iterator[None]:
    """Force a regime for the collectives that are traced inside the context; see Policy.

    The context is part of jit's cache key: a function that was traced outside is traced again.
    """
    with _context(Policy(regime, blocks, staging_bytes, atom, depth)):
        yield


def resolve(given: Policy | str | None) -> Policy:
    """The policy in force: the argument, else the context, else PURLIN_POLICY, else "auto".

    A text is the name of a regime.
    """
    found = given or _context.value or os.environ.get("PURLIN_POLICY") or "auto"
    return Policy(found) if isinstance(found, str) else found


@dataclass(frozen=True)
class Choice:
    """What a call runs with."""

    regime: str
    atom: str
    blocks: int
    threads: int
    depth: int
    staging_bytes: int


@dataclass(frozen=True)
class Traffic:
    """What a call moves from each rank to each peer.

    Attributes:
      nbytes: of all operands together.
      item_bytes: of an element, in reductions; 1 for copies.
      packed: whether the blocks have no gaps on the sender's side, and on the receiver's.
      capacity: bytes that the windows of a group hold, for regimes that have such a limit.
    """

    nbytes: int
    item_bytes: int = 1
    packed: tuple[bool, bool] = (True, True)
    capacity: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, plans: Iterable[dict[str, Any]], item_bytes: int, capacity: dict[str, int]) -> Self:
        """Of the box plans of all operands."""
        known = list(plans)
        sides = (all(p["src_packed"] for p in known), all(p["dst_packed"] for p in known))
        return cls(sum(p["bytes"] for p in known), item_bytes, sides, capacity)


def own_folder() -> Path:
    """Where tables lie that go before those of the package: PURLIN_POLICIES, else a folder among
    the user's configuration. `python -m purlin_jax tune` writes there."""
    given = os.environ.get("PURLIN_POLICIES")
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(given) if given else Path(base) / "purlin_jax" / "policies"


def _tables() -> dict[str, Traversable | Path]:
    folder = resources.files("purlin_jax").joinpath("policies")
    found: dict[str, Traversable | Path] = {
        f.name.removesuffix(".json"): f for f in folder.iterdir()
    }
    own = own_folder()
    found.update({f.stem: f for f in sorted(own.glob("*.json"))} if own.is_dir() else {})
    return found


@cache
def table(arch: str) -> dict[str, Any]:
    """The policy table of `arch`; of the newest older GPU generation where it has none.

    A file in own_folder() goes before the package's of the same name.
    """
    tables = _tables()
    if arch not in tables:
        names = [n for n in tables if n.startswith("sm_")]
        older = [n for n in names if int(n[3:]) <= int(arch[3:])]
        arch = max(older or names, key=lambda n: int(n[3:]))
    return json.loads(tables[arch].read_text())


_FLAGGED = ("packet", "line")  # data and flags travel in words of eight bytes
_ROUNDING = 512  # bytes that several operands may waste in packets and lines
_EITHER_WAY = ("zero_staging", "zero_staging_push")


def choose(forced: Policy, op: str, arch: str, world: int, traffic: Traffic) -> Choice:
    """Regime and knobs of a call, from data that all ranks share.

    The first row of the table for this world and op counts, and in it the first band that is wide
    enough and fits the op, the elements and the windows. What `forced` gives goes before. Copies
    between arrays keep the peer's side without gaps where one side has some: strided accesses cost
    less near than far (facts in docs/design.md).
    """
    found = table(arch)
    bands = next(
        row["bands"]
        for row in found["rows"]
        if row["world"] in (world, "any") and op in row.get("ops", (op,))
    )
    if forced.regime != "auto":
        fitting_ops, _ = _native.regimes[forced.regime]
        if op not in fitting_ops:
            raise ValueError(
                f"purlin.{op}: regime {forced.regime!r} is for {', '.join(fitting_ops)} alone; "
                "force another, or leave it to the policy"
            )
        if forced.regime not in found["regimes"]:
            raise ValueError(
                f"purlin: {arch} has no regime {forced.regime!r}; take one of {found['regimes']}"
            )
        unknown = {"up_to_bytes": None, "regime": forced.regime, "blocks": 0, "threads": 0}
        bands = [b for b in bands if b["regime"] == forced.regime] or [unknown]
    else:
        bands = [b for b in bands if _fits(b["regime"], op, arch, traffic)]
    wide = (b for b in bands if b["up_to_bytes"] is None or traffic.nbytes <= b["up_to_bytes"])
    band = next(wide, bands[-1])
    regime = band["regime"]
    copies = _native.collectives[op]["consume"] == "copy"
    if forced.regime == "auto" and regime in _EITHER_WAY and copies:
        pull, push = traffic.packed
        if pull != push:
            regime = _EITHER_WAY[0 if pull else 1]
    return Choice(
        regime,
        forced.atom or band.get("atom", found["atom"]),
        forced.blocks or band["blocks"],
        band["threads"],
        forced.depth or band.get("depth", 0),
        forced.staging_bytes,
    )


def _fits(regime: str, op: str, arch: str, traffic: Traffic) -> bool:
    if op not in _native.regimes[regime][0]:
        return False
    if regime in _FLAGGED and arch != "cpu" and traffic.item_bytes > 8:
        return False
    room = traffic.capacity.get(regime)
    return room is None or traffic.nbytes + _ROUNDING <= room
