"""The choice of a regime and its knobs, from tables that are data."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import jax

from purlin_jax import _native

REGIMES = ("auto", *_native.regimes)


@dataclass(frozen=True)
class Policy:
    """What a caller forces; the rest is read from the table of the architecture.

    Attributes:
      regime: one of REGIMES; "auto" leaves it to the table.
      blocks: blocks of each rank's kernel, 1 to 64; 0 leaves it to the table.
      atom: the Atom of a GPU's kernels ("generic", "ampere", "hopper", "blackwell"); "" leaves it to
        the table.
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


def _tables() -> list[str]:
    folder = resources.files("purlin_jax").joinpath("policies")
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir())


@cache
def table(arch: str) -> dict[str, Any]:
    """The policy table of `arch`; of the newest older GPU generation where it has none."""
    names = _tables()
    if arch not in names:
        older = [n for n in names if n.startswith("sm_") and int(n[3:]) <= int(arch[3:])]
        arch = max(older or [n for n in names if n.startswith("sm_")], key=lambda n: int(n[3:]))
    text = resources.files("purlin_jax").joinpath("policies", f"{arch}.json").read_text()
    return json.loads(text)


def choose(forced: Policy, op: str, arch: str, world: int, pair_bytes: int) -> Choice:
    """Knobs for `pair_bytes` from each rank to each peer, from data that all ranks share."""
    found = table(arch)
    row = next(
        (r for r in found["rows"] if r["world"] == world),
        next(r for r in found["rows"] if r["world"] == "any"),
    )
    bands = row["bands"]
    if forced.regime != "auto":
        fitting_ops, _ = _native.regimes[forced.regime]
        if op not in fitting_ops:
            raise ValueError(
                f"purlin.{op}: regime {forced.regime!r} is for {', '.join(fitting_ops)} alone; "
                "force another, or leave it to the policy"
            )
        bands = [b for b in bands if b["regime"] == forced.regime]
        if not bands:
            if forced.regime not in found["regimes"]:
                raise ValueError(
                    f"purlin: {arch} has no regime {forced.regime!r}; take one of "
                    f"{found['regimes']}"
                )
            bands = [{"up_to_bytes": None, "regime": forced.regime, "blocks": 0, "threads": 0}]
    fitting = (b for b in bands if b["up_to_bytes"] is None or pair_bytes <= b["up_to_bytes"])
    band = next(fitting, bands[-1])
    blocks = forced.blocks or band["blocks"]
    atom = forced.atom or band.get("atom", found["atom"])
    depth = forced.depth or band.get("depth", 0)
    return Choice(band["regime"], atom, blocks, band["threads"], depth, forced.staging_bytes)
