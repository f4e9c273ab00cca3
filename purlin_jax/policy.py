"""The choice of a regime and its knobs, from tables that are data."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from purlin_jax import _native
from purlin_jax.table_check import ATOMS, FLAGGED, LIMITS, PACKAGED, check, outside

REGIMES = ("auto", *_native.regimes)


@dataclass(frozen=True)
class Policy:
    """What a caller forces; the rest is read from the table of the architecture.

    Attributes:
      regime: one of REGIMES; "auto" leaves it to the table.
      blocks: blocks of each rank's kernel, 1 to 64; 0 leaves it to the table.
      atom: of a GPU's kernels, "generic" for example; "" leaves it to the table.
      depth: stages of the Atom's ring in shared memory, 1 to 8; 0 leaves it to the table.
      threads: threads of a block on GPUs, a multiple of 32 up to 512; 0 leaves it to the table.
      staging_bytes: what a call may use of one half of the staging ("staged" and "composed"); 0
        for all of it. More rounds where data does not fit.
    """

    regime: str = "auto"
    blocks: int = 0
    staging_bytes: int = 0
    atom: str = ""
    depth: int = 0
    threads: int = 0

    def __post_init__(self) -> None:
        if self.regime not in REGIMES:
            raise ValueError(f"purlin.policy: no regime {self.regime!r}; take one of {REGIMES}")
        if self.atom not in ("", *ATOMS):
            raise ValueError(f"purlin.policy: no Atom {self.atom!r}; take one of {ATOMS}")
        for name in ("blocks", "staging_bytes", "depth", "threads"):
            given = getattr(self, name)
            if not isinstance(given, int | np.integer) or isinstance(given, bool):
                raise TypeError(f"purlin.policy: {name}={given!r} is no integer")
        for name in LIMITS:
            if why := outside(name, getattr(self, name)):
                raise ValueError(f"purlin.policy: {why}")
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
    threads: int = 0,
) -> Iterator[None]:
    """Force a regime for the collectives that are traced inside the context; see Policy.

    The context is part of jit's cache key: a function that was traced outside is traced again.
    """
    with _context(Policy(regime, blocks, staging_bytes, atom, depth, threads)):
        yield


def resolve(given: Policy | str | None) -> Policy:
    """The policy in force: the argument, else the context, else PURLIN_POLICY, else "auto".

    A text is the name of a regime.
    """
    found = given or _context.value or os.environ.get("PURLIN_POLICY") or "auto"
    if not isinstance(found, Policy | str):
        raise TypeError(
            f"purlin: policy={found!r}; take a purlin.Policy, or the name of a regime: {REGIMES}"
        )
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
    packet_bytes: int = 0  # of a counted stream that travels in packets, at most


@dataclass(frozen=True)
class Traffic:
    """What a call moves from each rank to each peer.

    Attributes:
      nbytes: of all operands together.
      item_bytes: of an element, in reductions; 1 for copies.
      packed: whether the blocks have no gaps on the sender's side, and on the receiver's.
      capacity: bytes that the windows of a group hold, for regimes that have such a limit.
      lends: whether ranks may read each other's arrays where they lie.
    """

    nbytes: int
    item_bytes: int = 1
    packed: tuple[bool, bool] = (True, True)
    capacity: Mapping[str, int] = field(default_factory=dict)
    lends: bool = True

    @classmethod
    def of(
        cls,
        plans: Iterable[dict[str, Any]],
        item_bytes: int,
        capacity: dict[str, int],
        *,
        lends: bool = True,
    ) -> Self:
        """Of the box plans of all operands."""
        known = list(plans)
        sides = (all(p["src_packed"] for p in known), all(p["dst_packed"] for p in known))
        return cls(sum(p["bytes"] for p in known), item_bytes, sides, capacity, lends)


def own_folder() -> Path:
    """Where tables lie that go before those of the package: PURLIN_POLICIES, else a folder among
    the user's configuration. `python -m purlin_jax tune` writes there."""
    given = os.environ.get("PURLIN_POLICIES")
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(given) if given else Path(base) / "purlin_jax" / "policies"


def _tables() -> dict[str, Traversable | Path]:
    found: dict[str, Traversable | Path] = {
        f.name.removesuffix(".json"): f for f in PACKAGED.iterdir()
    }
    own = own_folder()
    found.update({f.stem: f for f in sorted(own.glob("*.json"))} if own.is_dir() else {})
    return found


def table_file(arch: str) -> Traversable | Path:
    """The file that holds the table of `arch`; of the newest older GPU generation if it has none.

    A file in own_folder() goes before the package's of the same name.
    """
    tables = _tables()
    if arch not in tables:
        names = [n for n in tables if n.startswith("sm_") and n[3:].isdigit()]
        older = [n for n in names if int(n[3:]) <= int(arch[3:])]
        arch = max(older or names, key=lambda n: int(n[3:]))
    return tables[arch]


def is_own(file: Traversable | Path) -> bool:
    """Whether a file that table_file gave is the user's, and not the package's."""
    return Path(str(file)).parent == own_folder()


@cache
def table(arch: str) -> dict[str, Any]:
    """What table_file(arch) holds; ValueError with the file's name if that is no policy table."""
    file = table_file(arch)
    try:
        found = json.loads(file.read_text())
        check(found)
    except ValueError as error:
        remedy = (
            "correct it, or remove it and the package's own is used"
            if is_own(file)
            else "install purlin_jax again"
        )
        raise ValueError(f"purlin: the policy table {file}: {error}; {remedy}") from error
    return found


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
    bands = row_of(found, op, world)["bands"]
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
        bands = [b for b in bands if fits(b["regime"], op, arch, traffic)]
    wide = (b for b in bands if b["up_to_bytes"] is None or traffic.nbytes <= b["up_to_bytes"])
    band = next(wide, bands[-1])
    regime = band["regime"]
    copies = _native.collectives[op]["consume"] == "copy"
    if forced.regime == "auto" and regime in _EITHER_WAY and copies:
        pull, push = traffic.packed
        if pull != push:
            regime = _EITHER_WAY[0 if pull else 1]
    if not traffic.lends and regime in _native.without_lending:
        if forced.regime != "auto":
            raise ValueError(
                f"purlin.{op}: regime {regime!r} needs arrays that other processes can map, and "
                "those of the allocator in use cannot be; take the default of "
                "XLA_PYTHON_CLIENT_ALLOCATOR, or leave the regime to the policy"
            )
        regime = _native.without_lending[regime]
    return Choice(
        regime,
        forced.atom or band.get("atom", found["atom"]),
        forced.blocks or band["blocks"],
        forced.threads or band["threads"],
        forced.depth or band.get("depth", 0),
        forced.staging_bytes,
        band.get("packet_bytes", 0),
    )


def row_of(found: dict[str, Any], op: str, world: int) -> dict[str, Any]:
    """The first row of a table for a world and an op."""
    return next(
        row
        for row in found["rows"]
        if row["world"] in (world, "any") and op in row.get("ops", (op,))
    )


def fits(regime: str, op: str, arch: str, traffic: Traffic) -> bool:
    """Whether a regime can run a call: its op, its elements, and the room in the windows."""
    if op not in _native.regimes[regime][0]:
        return False
    if regime in FLAGGED and arch.startswith("sm_") and traffic.item_bytes > 8:
        return False
    room = traffic.capacity.get(regime)
    return room is None or traffic.nbytes + _ROUNDING <= room
