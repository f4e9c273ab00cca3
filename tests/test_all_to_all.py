"""all_to_all equals jax.lax.all_to_all bit for bit, for every axis, dtype, shape and group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import purlin_jax as purlin
from tests.harness import (
    P,
    assert_same_bits,
    exchanged,
    mesh,
    native_collectives,
    parity,
    random_array,
    reordered_2x4,
    run_counted,
    sharded,
)

WORLDS = (1, 2, 3, 5, 8)
# All nine pairs of axes of a rank-3 array, in some of them counted from the end.
PAIRS = [(s, c) for s in (0, -2, 2) for c in (0, 1, -1)]

NARROW = (
    *("bool", "int8", "uint8", "int16", "int32", "uint32", "float16", "bfloat16", "float32"),
    *("float8_e4m3fn", "float8_e5m2", "complex64"),
)
WIDE = ("int64", "float64", "complex128")


def _both(axis: Any, split: int, concat: int, **kwargs: Any) -> tuple[Callable, Callable]:
    """purlin's and jax.lax's all_to_all with the same arguments."""
    kwargs = {"tiled": True, **kwargs}

    def theirs(tree: Any) -> Any:
        # jax.lax crashes the process on negative axes, so it gets them counted from the front.
        return jax.tree.map(
            lambda v: jax.lax.all_to_all(v, axis, split % v.ndim, concat % v.ndim, **kwargs), tree
        )

    return lambda v: purlin.all_to_all(v, axis, split, concat, **kwargs), theirs


def test_the_detector_knows_collectives_of_xla() -> None:
    over = mesh(8)
    x = random_array("float32", (64, 16))
    programs = {
        "all-to-all": lambda v: jax.lax.all_to_all(v, "x", 1, 0, tiled=True),
        "all-reduce": lambda v: v + jax.lax.psum(v, "x"),
        "all-gather": lambda v: jax.lax.all_gather(v, "x", tiled=True),
        "reduce-scatter": lambda v: jax.lax.psum_scatter(v, "x", tiled=True),
        "collective-permute": lambda v: jax.lax.ppermute(v, "x", [(0, 1), (1, 0)]),
    }
    for name, program in programs.items():
        assert name in native_collectives(sharded(program, over).lower(x).compile().as_text())
    started = "  %s = (f32[8]{0}, f32[8]{0}) all-gather-start(%p), channel_id=1"
    assert native_collectives(started) == ["all-gather"]


@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("tiled", (True, False))
@pytest.mark.parametrize("world", WORLDS)
def test_every_pair_of_axes(world: int, tiled: bool, check_vma: bool) -> None:
    local = (2 * world, world, 3 * world) if tiled else (world,) * 3
    x = random_array("float32", (world * local[0], *local[1:]), seed=world)
    calls = [(f"{s}{c}", _both("x", s, c, tiled=tiled)) for s, c in PAIRS]
    got, expected = parity(
        lambda v: {name: ours(v) for name, (ours, _) in calls},
        lambda v: {name: theirs(v) for name, (_, theirs) in calls},
        x,
        mesh=mesh(world),
        check_vma=check_vma,
        op="all_to_all",
        calls=len(calls),
    )
    assert_same_bits(got, expected)


@pytest.mark.parametrize("dtype", NARROW + WIDE)
def test_every_dtype(dtype: str) -> None:
    x = random_array(dtype, (12, 6, 5))
    with jax.enable_x64(dtype in WIDE):
        got, expected = parity(*_both("x", 1, 2), x, mesh=mesh(3), op="all_to_all")
    assert got.dtype == x.dtype
    assert_same_bits(got, expected)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32", "float8_e5m2", "complex64"))
def test_bits_of_nan_and_negative_zero_stay(dtype: str) -> None:
    # Every bit pattern may occur, signalling NaNs included, so numpy is the oracle.
    kind = np.dtype(dtype)
    raw = np.random.default_rng(0).integers(0, 256, 16 * 8 * 4 * kind.itemsize, np.uint8)
    x = raw.view(kind).reshape(16, 8, 4).copy()
    x[:, 0] = -0.0
    x[:, 1] = np.frombuffer(b"\x01" * (kind.itemsize - 1) + b"\x7f", kind)[0]  # NaN, odd payload
    program = sharded(_both("x", 1, 0)[0], mesh(4))
    got = run_counted(program, x, op="all_to_all", calls=4)
    assert_same_bits(got, np.concatenate(exchanged(np.split(x, 4), 1, 0)))


@pytest.mark.parametrize("run", (1, 3, 5, 7))
def test_odd_numbers_of_bytes(run: int) -> None:
    x = random_array("uint8", (5 * 5, 3, run))
    for split, concat in ((0, 1), (0, 2), (0, 0)):
        got, expected = parity(*_both("x", split, concat), x, mesh=mesh(5), op="all_to_all")
        assert_same_bits(got, expected)


@pytest.mark.beyond("packet", why="32,772 words for each pair, and packets hold 16,384")
@pytest.mark.parametrize("concat", (0, 1, 2))
def test_large_arrays(concat: int) -> None:
    # Large enough that several threads share the work, in rows that no share ends on.
    x = random_array("int8", (8 * 8, 16, 8193))
    got, expected = parity(*_both("x", 1, concat), x, mesh=mesh(8), op="all_to_all")
    assert_same_bits(got, expected)


@pytest.mark.parametrize("shape", ((4, 0, 2), (4, 2, 0), (0, 2, 2), (4, 8, 0)))
def test_empty_arrays(shape: tuple[int, ...]) -> None:
    # XLA may drop a call without bytes, so only the results count here.
    x = np.zeros(shape, np.float32)
    ours, theirs = _both("x", 1, 0)
    got = sharded(ours, mesh(2))(x)
    assert_same_bits(np.asarray(got), np.asarray(sharded(theirs, mesh(2))(x)))


@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("axis", (("a", "b"), ("b", "a"), "a", "b"), ids=str)
def test_axes_of_a_reordered_mesh(axis: Any, check_vma: bool) -> None:
    x = random_array("float32", (64, 16))
    got, expected = parity(
        *_both(axis, 1, 0), x, mesh=reordered_2x4(), check_vma=check_vma, op="all_to_all"
    )
    assert_same_bits(got, expected)


@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("tiled", (True, False))
@pytest.mark.parametrize(
    "groups", ([[0, 2, 5, 7], [6, 4, 3, 1]], [[1, 0], [2, 3], [7, 4], [5, 6]], [[3, 1, 0, 2]])
)
def test_axis_index_groups(groups: list[list[int]], tiled: bool, check_vma: bool) -> None:
    size = sum(map(len, groups))
    x = random_array("float32", (size * 2, len(groups[0]), 4))
    both = _both("x", 1, 2, axis_index_groups=groups, tiled=tiled)
    got, expected = parity(*both, x, mesh=mesh(size), check_vma=check_vma, op="all_to_all")
    assert_same_bits(got, expected)


@pytest.mark.parametrize("check_vma", (True, False))
def test_leaves_of_a_pytree_travel_four_in_a_call(check_vma: bool) -> None:
    tree = {
        "a": [random_array("float32", (16, 8)), random_array("int8", (16, 4, 3), 1)],
        "b": {"c": random_array("bfloat16", (16, 4, 1, 5), 2), "d": random_array("bool", (16, 8))},
        "e": random_array("complex64", (16, 12), 3),
        "f": random_array("int16", (32, 4), 4),
    }
    got, expected = parity(
        *_both("x", 1, 0), tree, mesh=mesh(4), check_vma=check_vma, op="all_to_all", calls=2
    )
    assert_same_bits(got, expected)


def test_leaves_that_vary_over_different_axes() -> None:
    # The axis "a" joins the type of one leaf only; results must keep that.
    def both(collective: Callable[..., Any]) -> Callable[..., Any]:
        return lambda t: collective(t, "b", 1, 0, tiled=True)

    x = {"ab": random_array("float32", (16, 8)), "b": random_array("float32", (16, 8), 1)}
    specs = {"ab": P(("a", "b")), "b": P("b")}
    got, expected = parity(
        both(purlin.all_to_all),
        both(jax.lax.all_to_all),
        x,
        mesh=reordered_2x4(),
        in_specs=(specs,),
        out_specs=specs,
        op="all_to_all",
    )
    assert_same_bits(got, expected)


def test_no_axis_is_the_identity() -> None:
    x = {"a": random_array("float32", (8, 4)), "b": random_array("int8", (8,))}
    program = sharded(lambda t: purlin.all_to_all(t, (), 0, 0), mesh(8))
    assert_same_bits(run_counted(program, x, op="all_to_all", calls=0), x)


def test_an_empty_pytree() -> None:
    def program(v: jax.Array) -> jax.Array:
        assert purlin.all_to_all({}, "x", 0, 0) == {}
        return v

    x = np.arange(8.0, dtype=np.float32)
    np.testing.assert_array_equal(sharded(program, mesh(8))(x), x)


def test_operands_that_do_not_vary_yet() -> None:
    # jax.lax makes a replicated operand varying by itself; so do we.
    x = jnp.arange(64, dtype=ml_dtypes.bfloat16).reshape(8, 8)
    got, expected = parity(*_both("x", 0, 1), x, mesh=mesh(8), in_specs=P(), op="all_to_all")
    assert_same_bits(got, expected)
