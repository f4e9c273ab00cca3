"""Box plans of all four rows of the layout table, run by a small interpreter in numpy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from purlin_jax import _native
from tests.harness import exchanged

OPS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
SPLITS = {"reduce_scatter", "all_to_all"}  # the input is cut into blocks
CONCATS = {"all_gather", "all_to_all"}  # the output is made of blocks


def _boxes(plan: dict[str, Any], side: int) -> np.ndarray:
    """Byte offsets, in iteration order, of a box on the source (0) or destination (1) side."""
    strides = [outer[1 + side] for outer in plan["outer"]]
    extents = [range(outer[0]) for outer in plan["outer"]]
    rows = [
        sum(i * s for i, s in zip(at, strides, strict=True)) for at in itertools.product(*extents)
    ]
    return (np.array(rows, np.int64)[:, None] + np.arange(plan["run"])).ravel()


def _interpret(op: str, shards: list[np.ndarray], split: int, concat: int) -> list[np.ndarray]:
    """What every rank gets by moving bytes as the plan says; each result byte is written once."""
    world, first = len(shards), shards[0]
    plan = _native.plan(op, list(first.shape), first.itemsize, world, split, concat)
    shape = _native.result_shape(op, list(first.shape), world, split, concat)
    source, target = _boxes(plan, 0), _boxes(plan, 1)
    assert len(source) == len(target) == plan["bytes"]
    reduces = op in ("reduce_scatter", "all_reduce")
    results = []
    for rank in range(world):
        out = np.zeros(shape, first.dtype)
        raw, writes = out.reshape(-1).view(np.uint8), np.zeros(out.nbytes, np.int64)
        for q, shard in enumerate(shards):
            moved = shard.reshape(-1).view(np.uint8)[source + rank * plan["src_step"]]
            at = target + q * plan["dst_step"]
            if reduces:
                total = raw[at].view(first.dtype) + moved.view(first.dtype)
                moved = total.view(np.uint8)
            raw[at] = moved
            writes[at] += 1
        assert (writes == (world if reduces else 1)).all()
        results.append(out)
    return results


def _reference(op: str, shards: list[np.ndarray], split: int, concat: int) -> list[np.ndarray]:
    world = len(shards)
    if op == "all_to_all":
        return exchanged(shards, split, concat)
    if op == "all_gather":
        return [np.concatenate(shards, concat)] * world
    total = sum(shards[1:], shards[0])
    return np.split(total, world, split) if op == "reduce_scatter" else [total] * world


def _shards(rng: np.random.Generator, shape: list[int], dtype: str, world: int) -> list[np.ndarray]:
    return [rng.integers(0, 100, shape).astype(dtype) for _ in range(world)]


@pytest.mark.parametrize("op", OPS)
def test_random_shapes_axes_and_worlds(op: str) -> None:
    rng = np.random.default_rng(OPS.index(op))
    for _ in range(150):
        world, rank = int(rng.integers(1, 7)), int(rng.integers(1, 6))
        shape = [int(n) for n in rng.choice([1, 1, 2, 3, 5], rank)]
        split, concat = (int(a) for a in rng.integers(0, rank, 2))
        if op in SPLITS:
            shape[split] *= world
        dtype = str(rng.choice(["uint8", "int16", "int32", "int64"]))
        shards = _shards(rng, shape, dtype, world)
        got = _interpret(op, shards, split, concat)
        for a, b in zip(got, _reference(op, shards, split, concat), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"{shape} {dtype} {world} {split} {concat}")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("split", "concat"), list(itertools.product(range(6), range(6))))
def test_three_strides_are_enough_at_any_rank(op: str, split: int, concat: int) -> None:
    shape = [2] * 6
    if op in SPLITS:
        shape[split] *= 3
    shards = _shards(np.random.default_rng(0), shape, "int16", 3)
    got = _interpret(op, shards, split, concat)
    np.testing.assert_array_equal(got, _reference(op, shards, split, concat))


@pytest.mark.parametrize(
    ("op", "shape", "split", "concat", "run"),
    (
        ("all_reduce", [3, 5, 7], 0, 0, 3 * 5 * 7 * 4),
        ("all_reduce", [3, 5, 7], 1, 2, 3 * 5 * 7 * 4),
        ("all_gather", [3, 5, 7], 0, 0, 3 * 5 * 7 * 4),
        ("all_gather", [1, 5, 7], 0, 1, 5 * 7 * 4),
        ("reduce_scatter", [8, 5, 7], 0, 0, 2 * 5 * 7 * 4),
        ("all_to_all", [8, 5, 7], 0, 0, 2 * 5 * 7 * 4),
        ("all_to_all", [4, 5, 7], 0, 1, 5 * 7 * 4),
        ("all_to_all", [1, 8, 7], 1, 0, 2 * 7 * 4),
        ("all_to_all", [1, 1, 8], 2, 1, 2 * 4),
    ),
)
def test_contiguous_boxes_are_one_run(
    op: str, shape: list[int], split: int, concat: int, run: int
) -> None:
    plan = _native.plan(op, shape, 4, 4, split, concat)
    assert plan["outer"] == []
    assert plan["run"] == plan["bytes"] == run


def test_the_longest_run_is_taken() -> None:
    # [batch, sequence, heads, dim]: a head's shard of heads * dim stays whole, no element alone.
    plan = _native.plan("all_to_all", [2, 16, 8, 32], 2, 4, 2, 1)
    assert plan["run"] == 2 * 32 * 2
    assert [extent for extent, _, _ in plan["outer"]] == [2, 16]


@pytest.mark.parametrize("world", (1, 2, 5))
@pytest.mark.parametrize("op", OPS)
def test_bytes_add_up(op: str, world: int) -> None:
    shape = [2 * world, 3, 5 * world]
    plan = _native.plan(op, shape, 2, world, 0, 2)
    result = _native.result_shape(op, shape, world, 0, 2)
    n, m = 2 * int(np.prod(shape)), 2 * int(np.prod(result))
    assert plan["bytes"] * (world if op in SPLITS else 1) == n
    assert plan["bytes"] * (world if op in CONCATS else 1) == m


@pytest.mark.parametrize("shape", ([0], [4, 0], [0, 4], [4, 0, 3], [4, 3, 0]))
def test_empty_arrays_have_no_bytes(shape: list[int]) -> None:
    for op, concat in itertools.product(OPS, range(len(shape))):
        plan = _native.plan(op, shape, 4, 2, 0, concat)
        assert plan["bytes"] == 0


def test_the_table() -> None:
    even = {op: row for op, row in _native.collectives.items() if not row["counted"]}
    assert tuple(even) == OPS
    for op, row in even.items():
        assert (row["input"] != "packed") == (op in SPLITS)
        assert (row["output"] != "packed") == (op in CONCATS)
        assert row["consume"] == ("reduce" if "reduce" in op else "copy")
