"""Collectives whose counts are data move exactly the rows that numpy moves, bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purlin_jax as purlin
from purlin_jax import _native
from tests.harness import assert_same_bits, random_array, to_numpy
from tests.varlen import (
    CASES,
    FOLDS,
    REGIMES,
    calls_of_everything,
    everything,
    everything_expected,
    exchange,
    feed,
    flat,
    gather,
    over,
    patterns,
    reduce,
    run_native,
    under,
)

ROWS = 96


@pytest.mark.own_regime
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("world", (1, 2, 3, 5, 8))
def test_every_pattern_of_counts(world: int, regime: str) -> None:
    ranks, policy = flat(world), REGIMES[regime]
    before = purlin.native_regimes()
    with under(regime):
        program = everything(ranks, ROWS)
        for name in patterns(world, ROWS):
            given = feed(ranks, name, ROWS)
            got = run_native(program, given, calls=calls_of_everything(ranks))
            assert_same_bits(got, everything_expected(ranks, given))
    after = purlin.native_regimes()
    ran = {key[1] for key, n in after.items() if n != before.get(key, 0)}
    assert ran == {"meet" if policy.regime == "auto" else policy.regime}


@pytest.mark.parametrize("case", CASES)
def test_groups_and_meshes(case: str) -> None:
    ranks = CASES[case]()
    program = everything(ranks, 16)
    for name in ("to one", "zipf", "some"):
        given = feed(ranks, name, 16)
        got = run_native(program, given, calls=calls_of_everything(ranks))
        assert_same_bits(got, everything_expected(ranks, given))


def test_wide_counts() -> None:
    with jax.enable_x64(True):
        ranks = flat(3)
        program = everything(ranks, 16)
        for name in patterns(3, 16):
            given = feed(ranks, name, 16, counts="int64")
            got = run_native(program, given, calls=calls_of_everything(ranks))
            assert got["reduce"][1].dtype == np.int64
            assert_same_bits(got, everything_expected(ranks, given))


@pytest.mark.own_regime
@pytest.mark.parametrize("regime", ("auto", "staged", "zero_staging, 3 blocks"))
def test_one_row_beside_a_million(regime: str) -> None:
    many, ranks = 1_000_000, flat(2)
    sizes = np.array([[1, many], [1, 1]], np.int32)
    x = random_array("uint8", (2, many + 1))

    def f(v: jax.Array, n: jax.Array) -> Any:
        out, _ = purlin.all_to_all_v(v, n, "x", capacity=many + 5)
        return out, purlin.reduce_scatter_v(v, jnp.array([1, many]), "x", "max", fill=None)[0]

    with under(regime):
        moved, largest = run_native(
            over(ranks, f), x, sizes, calls={"all_to_all_v": 2, "reduce_scatter_v": 2}
        )
    assert_same_bits(moved, exchange(x, sizes, many + 5))
    expected = reduce(x, np.array([1, many]), many + 1, "max")
    assert_same_bits((largest[0, :1], largest[1, :many]), (expected[0, :1], expected[1, :many]))


NARROW = (
    *("bool", "int8", "uint8", "int16", "int32", "uint32", "float16", "bfloat16", "float32"),
    *("float8_e4m3fn", "float8_e5m2", "complex64"),
)
WIDE = ("int64", "float64", "complex128")
# What belongs to one row: 1 to 15 elements.
TRAILING = ((), (1,), (3,), (2, 3), (1, 5, 1), (15,))


@pytest.mark.parametrize("backend", ("purlin", "lax"))
def test_dtypes_and_row_widths(backend: str) -> None:
    sizes = np.array([[2, 0, 1], [0, 3, 4], [5, 1, 1]], np.int32)
    with jax.enable_x64(True):
        leaves = [
            random_array(dtype, (3, 7, *TRAILING[i % len(TRAILING)]), i)
            for i, dtype in enumerate((*NARROW, *WIDE, *NARROW[::-1]))
        ]
        x = {f"{i} {v.dtype} {v.shape}": v for i, v in enumerate(leaves)}

        def f(t: Any, n: jax.Array) -> Any:
            # Rows of nothing; made here, since jaxlib 0.11.2 crashes when it compiles a sharded
            # program that takes an empty array beside others.
            t = t | {"empty": jnp.zeros((7, 0)), "empty inside": jnp.zeros((7, 3, 0, 2))}
            exchanged = purlin.all_to_all_v(t, n, "x", capacity=9, backend=backend)[0]
            return exchanged, purlin.all_gather_v(t, n[0], "x", capacity=8, backend=backend)[0]

        # Four operands travel together, whatever their dtypes.
        calls = 3 * -(-len(x) // _native.max_operands)  # XLA drops one of nothing alone
        native = {"all_to_all_v": calls, "all_gather_v": calls}
        got = run_native(over(flat(3), f), x, sizes, calls=native if backend == "purlin" else {})
        moved, gathered = ({}, {})
        for name, v in x.items():
            moved[name] = exchange(v, sizes, 9)
            gathered[name] = gather(v, sizes[:, 0], 8)
        for result, rows in ((moved, 9), (gathered, 8)):
            result["empty"] = np.zeros((3, rows, 0))
            result["empty inside"] = np.zeros((3, rows, 3, 0, 2))
        assert_same_bits(got, (moved, gathered))


@pytest.mark.parametrize("rows", (0, 4))
@pytest.mark.parametrize("backend", ("purlin", "lax"))
def test_no_rows_at_all(backend: str, rows: int) -> None:
    # In the operand, or in the result.
    capacity = 4 - rows
    x = random_array("float32", (3, 4, 2))
    zeros = np.zeros((3, capacity, 2), np.float32)

    def f(v: jax.Array, kept: jax.Array) -> Any:
        v, kept = v[:rows], kept[:capacity]  # made empty here, as above
        none = jnp.zeros(3, jnp.int32)
        at = jnp.full(3, min(rows, capacity), jnp.int32)
        return (
            purlin.all_to_all_v(v, none, "x", capacity=capacity)[0],
            purlin.all_gather_v(v, none[0], "x", capacity=capacity)[0],
            purlin.reduce_scatter_v(v, none, "x", capacity=capacity)[0],
            purlin.ragged_all_to_all(v, kept, at, none, at, none, axis_name="x"),
            purlin.all_to_all_v(v, [0, 0, 0], "x")[0],
        )

    with purlin.backend(backend):
        got = to_numpy(over(flat(3), f)(x, np.ones_like(x)))
    assert_same_bits(got, (zeros, zeros, zeros, zeros + 1, np.zeros((3, 0, 2), np.float32)))


@pytest.mark.own_regime
@pytest.mark.parametrize("regime", ("auto", "packet", "staged, rounds", "zero_staging"))
def test_every_reduction(regime: str) -> None:
    sizes = np.array([3, 0, 8], np.int32)
    x = {
        dtype: random_array(dtype, (3, 12, 5), i)
        for i, dtype in enumerate((*NARROW, "int64", "float64"))
    }
    ops = {op: [d for d in x if (op, d) in _native.reduces] for op in FOLDS}
    assert all(len(dtypes) >= 6 for dtypes in ops.values())
    ops["prod"].remove("complex64")  # how that is rounded is up to the compiler

    def f(t: Any, n: jax.Array) -> Any:
        return {
            op: purlin.reduce_scatter_v({d: t[d] for d in dtypes}, n, "x", op, capacity=9)[0]
            for op, dtypes in ops.items()
        }

    with jax.enable_x64(True), under(regime):
        calls = {"reduce_scatter_v": 3 * sum(map(len, ops.values()))}
        got = run_native(over(flat(3), f), x, np.stack([sizes] * 3), calls=calls)
    expected = {op: {d: reduce(x[d], sizes, 9, op) for d in ds} for op, ds in ops.items()}
    assert_same_bits(got, expected)


def test_rows_that_nobody_fills() -> None:
    # Asked for nothing, the rows behind the received ones may hold anything; those before may not.
    ranks, rows = flat(3), 8
    given = feed(ranks, "zipf", rows)

    def f(t: Any) -> Any:
        return (
            purlin.all_to_all_v(t["x"], t["sizes"], "x", capacity=27, fill=None)[0],
            purlin.all_gather_v(t["x"], t["size"], "x", fill=None)[0],
            purlin.reduce_scatter_v(t["x"], t["blocks"], "x", fill=None)[0],
        )

    got = to_numpy(over(ranks, f)(given))
    expected = everything_expected(ranks, given)
    total = given["size"].sum()
    ends = (given["sizes"].sum(0), [total] * 3, given["blocks"][0])
    for y, name, end in zip(got, ("exchange", "gather", "reduce"), ends, strict=True):
        for leaf, rank in np.ndindex(2, 3):
            a, b = y["ab"[leaf]][rank], expected[name][0]["ab"[leaf]][rank]
            assert a.shape == b.shape
            assert_same_bits(a[: end[rank]], b[: end[rank]])


@pytest.mark.parametrize("backend", ("purlin", "lax"))
def test_counts_that_are_numbers(backend: str) -> None:
    ranks = CASES["groups"]()
    x = random_array("int16", (8, 10, 3))
    matrix = np.array([[1, 0, 2, 7], [0, 0, 0, 0], [3, 3, 3, 1], [10, 0, 0, 0]])
    vector = [2, 0, 4, 1]

    def f(v: jax.Array) -> dict[str, Any]:
        call = {**ranks.call, "backend": backend}
        return {
            "matrix": purlin.all_to_all_v(v, matrix, **call),
            "lists": purlin.all_to_all_v(v, matrix.tolist(), capacity=20, **call),
            "vector": purlin.all_to_all_v(v, vector, **call),
            "gathered": purlin.all_gather_v(v, vector, **call),
            "roomy": purlin.all_gather_v(v, tuple(vector), capacity=9, **call),
            "reduced": purlin.reduce_scatter_v(v, vector, op="max", **call),
        }

    got = to_numpy(over(ranks, f)(x))
    for group in ranks.members:
        v, alike, numbers = x[group], np.array([vector] * 4), np.array(vector, np.int32)
        expected = {
            "matrix": (exchange(v, matrix, 14), matrix.T.astype(np.int32)),
            "lists": (exchange(v, matrix, 20), matrix.T.astype(np.int32)),
            "vector": (exchange(v, alike, 16), alike.T.astype(np.int32)),
            "gathered": (gather(v, numbers, 7), np.stack([numbers] * 4)),
            "roomy": (gather(v, numbers, 9), np.stack([numbers] * 4)),
            "reduced": (reduce(v, numbers, 4, "max"), numbers),
        }
        assert_same_bits(jax.tree.map(lambda y, g=group: y[g], got), expected)
