"""Numpy references of the collectives whose counts are data, and data with counts to feed them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import purlin_jax as purlin
from tests.harness import Fn, mesh, random_array, reordered_2x4, sharded, to_numpy


class Ranks(NamedTuple):
    """Who takes part: `members` are the shards of each group, in rank order."""

    mesh: Mesh
    axis: Any
    groups: Any
    members: Sequence[Sequence[int]]

    @property
    def world(self) -> int:
        return len(self.members[0])

    @property
    def call(self) -> dict[str, Any]:
        """The arguments of a collective among them."""
        return {"axis_name": self.axis, "axis_index_groups": self.groups}


def flat(world: int) -> Ranks:
    return Ranks(mesh(world), "x", None, [range(world)])


GROUPS = [[6, 0, 3, 5], [1, 2, 7, 4]]
CASES = {
    "groups": lambda: Ranks(mesh(8), "x", GROUPS, GROUPS),
    "axis b": lambda: Ranks(reordered_2x4(), "b", None, [range(4), range(4, 8)]),
    "axis a": lambda: Ranks(reordered_2x4(), "a", None, [(i, i + 4) for i in range(4)]),
    "axes a, b": lambda: Ranks(reordered_2x4(), ("a", "b"), None, [range(8)]),
    "axes b, a": lambda: Ranks(reordered_2x4(), ("b", "a"), None, [[0, 4, 1, 5, 2, 6, 3, 7]]),
}


def over(ranks: Ranks, f: Fn, **kwargs: Any) -> Fn:
    """jit of `f` on every shard; arrays around it hold one element for each."""

    def body(*trees: Any) -> Any:
        local = jax.tree.map(lambda v: v[0], trees)
        return jax.tree.map(lambda y: y[None], f(*local))

    return sharded(body, ranks.mesh, **kwargs)


def run_native(f: Fn, *args: Any, calls: dict[str, int]) -> Any:
    """f(*args) as numpy; native code must have run exactly these calls, and no other."""
    before = purlin.native_calls()
    result = to_numpy(jax.block_until_ready(f(*args)))
    after = purlin.native_calls()
    made = {op: n - before.get(op, 0) for op, n in after.items() if n != before.get(op, 0)}
    assert made == calls
    return result


def packed(parts: Sequence[np.ndarray], capacity: int) -> np.ndarray:
    """`parts` one behind another, and zeros."""
    rows = np.concatenate(parts)
    result = np.zeros((capacity, *rows.shape[1:]), rows.dtype)
    result[: len(rows)] = rows
    return result


def exchange(xs: Any, sizes: np.ndarray, capacity: int) -> np.ndarray:
    """all_to_all_v of one group; `sizes` is [sender, receiver]."""
    ends = np.cumsum(sizes, 1)
    return np.stack([
        packed([x[e[r] - n[r] : e[r]] for x, n, e in zip(xs, sizes, ends, strict=True)], capacity)
        for r in range(len(sizes))
    ])  # fmt: skip


def gather(xs: Any, size: np.ndarray, capacity: int) -> np.ndarray:
    """all_gather_v of one group."""
    rows = packed([x[:n] for x, n in zip(xs, size, strict=True)], capacity)
    return np.stack([rows] * len(size))


FOLDS = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def reduce(xs: Any, sizes: np.ndarray, capacity: int, op: str = "sum") -> np.ndarray:
    """reduce_scatter_v of one group: in rank order, small floats in float32 and rounded once."""
    dtype = xs[0].dtype
    small = dtype.itemsize < 4 and dtype.kind not in "iub"
    wide = [x.astype(np.float32) if small else x for x in xs]
    total = functools.reduce(FOLDS[op], wide).astype(dtype)
    ends = np.cumsum(sizes)
    return np.stack(
        [packed([total[e - n : e]], capacity) for n, e in zip(sizes, ends, strict=True)]
    )


def ragged(xs: Any, kept: Any, starts: Any, sizes: Any, places: Any) -> np.ndarray:
    """ragged_all_to_all of one group; all numbers are [sender, receiver * slices]."""
    results = np.array(kept)
    slices = sizes.shape[1] // len(xs)
    for q, i in np.ndindex(*sizes.shape):
        start, n, place = starts[q, i], sizes[q, i], places[q, i]
        results[i // slices][place : place + n] = xs[q][start : start + n]
    return results


# Small enough that long streams take several rounds.
TINY = 1 << 12
REGIMES = {
    "auto": purlin.Policy(),
    "meet, 3 blocks": purlin.Policy("meet", 3),
    "packet": purlin.Policy("packet"),
    "packet, 3 blocks": purlin.Policy("packet", 3),
    "staged": purlin.Policy("staged"),
    "staged, rounds": purlin.Policy("staged", 2, TINY),
    "zero_staging": purlin.Policy("zero_staging"),
    "zero_staging, 3 blocks": purlin.Policy("zero_staging", 3),
}


def under(regime: str) -> Any:
    """The context of one of REGIMES."""
    p = REGIMES[regime]
    return purlin.policy(p.regime, blocks=p.blocks, staging_bytes=p.staging_bytes)


def patterns(world: int, rows: int) -> dict[str, np.ndarray]:
    """Rows that each rank sends each other, [sender, receiver], none more than `rows` together."""
    rng = np.random.default_rng(world)
    nobody = np.zeros((world, world), int)
    one, last, huge, ring, tiny = (nobody.copy() for _ in range(5))
    one[world // 2] = rows // world
    last[:, -1] = rows
    each = np.arange(world)
    ring[each, (each + 1) % world] = 1
    huge[:] = ring
    huge[0, 1 % world] = rows
    tiny[:] = 1
    tiny[each, (each + 1) % world] = rows - world + 1
    shares = 1 / np.arange(1, world + 1)
    zipf = np.stack([rng.permutation(rows * shares / shares.sum()).astype(int) for _ in each])
    some = rng.multinomial(rows, np.full(2 * world, 0.5 / world), world)[:, :world]
    return {
        "nobody": nobody,
        "one sends": one,
        "to one": last,
        "to itself": np.eye(world, dtype=int) * rows,
        "one huge": huge,
        "ring among tiny": tiny,
        "zipf": zipf,
        "some": some * rng.integers(0, 2, some.shape),
        "uniform": np.full((world, world), rows // world),
    }


def spread(sizes: Any, room: int, rng: np.random.Generator) -> np.ndarray:
    """First rows of blocks, in any order and with gaps, in an array of `room` rows."""
    at, free, first = 0, room - sum(sizes), np.zeros_like(sizes)
    for p in rng.permutation(len(sizes)):
        gap = rng.integers(0, free + 1)
        first[p], at, free = at + gap, at + gap + sizes[p], free - gap
    return first


def feed(ranks: Ranks, name: str, rows: int, *, counts: Any = "int32", seed: int = 0) -> Any:
    """Operands and counts of `everything`, for one of `patterns`; other groups get other counts."""
    rng, n = np.random.default_rng(seed), ranks.mesh.size
    room = capacity_of(ranks, rows)
    numbers = {key: np.zeros((n, ranks.world), counts) for key in NUMBERS}
    for turn, group in enumerate(ranks.members):
        group = list(group)
        sizes = np.roll(patterns(ranks.world, rows)[name], turn, axis=0)
        numbers["sizes"][group] = sizes
        numbers["expected"][group] = sizes.T
        numbers["blocks"][group] = sizes[ranks.world // 2]
        numbers["starts"][group] = [spread(row, rows, rng) for row in sizes]
        numbers["places"][group] = np.transpose([spread(row, room, rng) for row in sizes.T])
    return {
        "x": {
            "a": random_array("float32", (n, rows, 3), seed),
            "b": random_array("uint8", (n, rows), seed),
        },
        "kept": random_array("float32", (n, room, 3), seed + 1),
        "size": numbers["sizes"].sum(1, dtype=counts),
        **numbers,
    }


NUMBERS = ("sizes", "expected", "blocks", "starts", "places")
ORDER = ("starts", "sizes", "places", "expected")  # those of ragged_all_to_all


def capacity_of(ranks: Ranks, rows: int) -> int:
    return ranks.world * rows + 3


def everything(ranks: Ranks, rows: int) -> Fn:
    """The four collectives on what feed() gives."""
    room = capacity_of(ranks, rows)

    def f(t: Any) -> dict[str, Any]:
        numbers = (t[key] for key in ORDER)
        return {
            "exchange": purlin.all_to_all_v(t["x"], t["sizes"], capacity=room, **ranks.call),
            "gather": purlin.all_gather_v(t["x"], t["size"], **ranks.call),
            "reduce": purlin.reduce_scatter_v(t["x"], t["blocks"], **ranks.call),
            "ragged": purlin.ragged_all_to_all(t["x"]["a"], t["kept"], *numbers, **ranks.call),
        }

    return over(ranks, f)


def calls_of_everything(ranks: Ranks) -> dict[str, int]:
    n = ranks.mesh.size
    return {"all_to_all_v": 2 * n, "all_gather_v": n, "reduce_scatter_v": 2 * n}


def by_group(ranks: Ranks, f: Fn, *trees: Any) -> Any:
    """`f` in numpy on what each group holds, put together again."""
    parts = [f(*jax.tree.map(lambda v, g=g: v[list(g)], trees)) for g in ranks.members]
    order = np.argsort(np.concatenate([list(group) for group in ranks.members]))
    return jax.tree.map(lambda *arrays: np.concatenate(arrays)[order], *parts)


def everything_expected(ranks: Ranks, given: Any) -> dict[str, Any]:
    """What the four collectives make of it."""

    def group(t: Any) -> dict[str, Any]:
        rows = len(t["x"]["a"][0])
        world = len(t["sizes"])

        def each(f: Fn, numbers: np.ndarray, capacity: int) -> Any:
            return jax.tree.map(lambda x: f(x, numbers, capacity), t["x"])

        moved = ragged(t["x"]["a"], t["kept"], t["starts"], t["sizes"], t["places"])
        return {
            "exchange": (each(exchange, t["sizes"], world * rows + 3), t["sizes"].T),
            "gather": (each(gather, t["size"], world * rows), np.stack([t["size"]] * world)),
            "reduce": (each(reduce, t["blocks"][0], rows), t["blocks"][0]),
            "ragged": moved,
        }

    return by_group(ranks, group, given)
