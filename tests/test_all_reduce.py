"""all_reduce folds in rank order in float32 and rounds once; all ranks get the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purlin_jax as purlin
from tests.harness import (
    P,
    assert_same_bits,
    mesh,
    parity,
    random_array,
    reordered_2x4,
    run_counted,
    sharded,
    summed,
    to_numpy,
)

WORLDS = (1, 2, 3, 5, 8)
DTYPES = ("float32", "bfloat16")
LARGE = pytest.mark.beyond("packet", why="arrays of more than the 16,384 words that packets hold")
GROUPS = [[0, 2, 5, 7], [6, 4, 3, 1]]


def _both(axis: Any, **kwargs: Any) -> tuple[Callable, Callable]:
    """purlin's and jax.lax's sum with the same arguments."""
    return (
        lambda v: purlin.all_reduce(v, axis, **kwargs),
        lambda v: jax.lax.psum(v, axis, **kwargs),
    )


def _of_each_rank(f: Callable[..., Any], x: Any, world: int, calls: int = 1) -> list[Any]:
    """What every rank of a flat mesh holds after f, in numpy."""
    program = sharded(f, mesh(world), check_vma=False)
    y = run_counted(program, x, op="all_reduce", calls=calls * world)
    return [jax.tree.map(lambda v, r=r: np.split(v, world)[r], y) for r in range(world)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", WORLDS)
def test_bits_of_a_sum_in_rank_order(world: int, dtype: str) -> None:
    x = random_array(dtype, (world * 4, 37), seed=world)
    ours, theirs = _both("x")
    expected = summed(np.split(x, world))
    for _ in range(2):
        for result in _of_each_rank(ours, x, world):
            assert_same_bits(result, expected)
    # jax.lax rounds a bfloat16 sum after every rank.
    tolerance = 1e-5 if dtype == "float32" else 2.0**-7 * world
    lax = np.asarray(sharded(theirs, mesh(world), check_vma=False)(x))[:4]
    np.testing.assert_allclose(
        expected.astype(np.float32), lax.astype(np.float32), rtol=tolerance, atol=tolerance
    )


def test_rank_order_matters_here() -> None:
    # The reference would not notice another order if the data did not.
    x = random_array("float32", (8, 37))
    backwards = summed(np.split(x, 8)[::-1])
    assert not np.array_equal(backwards, summed(np.split(x, 8)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", WORLDS)
def test_result_is_invariant_under_check_vma(world: int, dtype: str) -> None:
    x = random_array(dtype, (world * 4, 37), seed=world)
    got, lax = parity(*_both("x"), x, mesh=mesh(world), out_specs=P(), op="all_reduce")
    assert_same_bits(got, summed(np.split(x, world)))
    assert lax.shape == got.shape


@LARGE
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_arrays(dtype: str) -> None:
    # Large enough that several threads share the work.
    x = random_array(dtype, (8, 300_001))
    for result in _of_each_rank(_both("x")[0], x, 8):
        assert_same_bits(result, summed(np.split(x, 8)))


@pytest.mark.parametrize("value", (-0.0, 0.0))
@pytest.mark.parametrize("dtype", DTYPES)
def test_sign_of_zero(dtype: str, value: float) -> None:
    x = np.full((8, 5), value, dtype)
    for result in _of_each_rank(_both("x")[0], x, 8):
        assert_same_bits(result, x[:1])


@pytest.mark.parametrize("size", (5, pytest.param(100_000, marks=LARGE)))
def test_subnormals_are_kept(size: int) -> None:
    x = np.full((8, size), 1e-40, np.float32)
    expected = summed(np.split(x, 8))
    assert (expected > 0).all()
    for result in _of_each_rank(_both("x")[0], x, 8):
        assert_same_bits(result, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity(dtype: str) -> None:
    x = np.ones((4, 6), dtype)
    x[2, 0] = np.nan
    x[0, 1], x[3, 1] = np.inf, -np.inf
    x[1, 2] = np.inf
    # NaNs whose payload lies in the lowest bit alone: rounding must not make infinities of them.
    quiet = {"float32": 0x7F800001, "bfloat16": 0x7F81}[dtype]
    x[:, 3] = np.array(quiet, f"u{x.itemsize}").view(x.dtype)
    for result in _of_each_rank(_both("x")[0], x, 4):
        row = result[0].astype(np.float32)
        assert np.isnan(row[[0, 1, 3]]).all()
        assert row[2] == np.inf
        assert (row[4:] == 4).all()


def test_every_small_bfloat16_size() -> None:
    sizes = range(1, 34)
    tree = {n: random_array("bfloat16", (5, n), seed=n) for n in sizes}
    expected = {n: summed(np.split(tree[n], 5)) for n in sizes}
    for result in _of_each_rank(_both("x")[0], tree, 5, calls=9):  # four leaves in a call
        assert_same_bits(result, expected)


@pytest.mark.parametrize("axis", (("a", "b"), ("b", "a"), "a", "b"), ids=str)
def test_axes_of_a_reordered_mesh(axis: Any) -> None:
    x = random_array("float32", (8, 6))
    names = axis if isinstance(axis, tuple) else (axis,)
    left = tuple(a for a in "ab" if a not in names)
    got, _ = parity(
        *_both(axis), x, mesh=reordered_2x4(), out_specs=P(left or None), op="all_reduce"
    )
    shards = x.reshape(2, 4, 6)
    order = {("b", "a"): shards.swapaxes(0, 1).reshape(8, 6), ("a", "b"): x}
    if len(names) == 2:
        expected = summed(list(order[names]))[None]
    else:
        expected = np.stack([summed(list(s)) for s in np.moveaxis(shards, 1 - "ab".index(axis), 0)])
    assert_same_bits(got, expected)


def test_axis_index_groups() -> None:
    x = random_array("float32", (8, 6))
    both = _both("x", axis_index_groups=GROUPS)
    got, lax = parity(*both, x, mesh=mesh(8), check_vma=False, op="all_reduce")
    expected = np.empty_like(x)
    for group in GROUPS:
        expected[group] = summed([x[i] for i in group])
    assert_same_bits(got, expected)
    np.testing.assert_allclose(got, lax, rtol=1e-5, atol=1e-6)


def test_a_sum_over_groups_is_not_typed_as_invariant() -> None:
    # Groups have different sums, so a result that claims to be replicated would be a lie.
    program = sharded(_both("x", axis_index_groups=GROUPS)[0], mesh(8), out_specs=P())
    with pytest.raises((ValueError, NotImplementedError)):
        program(random_array("float32", (8, 6)))


def test_leaves_of_one_dtype_travel_together() -> None:
    tree = {
        "a": [random_array("float32", (4, 3)), random_array("bfloat16", (4, 5, 2), 1)],
        "b": [random_array("float32", (8, 2), seed) for seed in range(4)],
        "c": np.arange(4, dtype=np.float32),
    }
    # Six leaves of float32 in two calls, one of bfloat16 in a third.
    got, lax = parity(*_both("x"), tree, mesh=mesh(4), out_specs=P(), op="all_reduce", calls=3)
    assert_same_bits(got, jax.tree.map(lambda v: summed(np.split(v, 4)), tree))
    close = jax.tree.map(lambda a, b: np.allclose(a, b, rtol=0.05, atol=0.05), got, to_numpy(lax))
    assert all(jax.tree.leaves(close))


def test_scalars_and_empty_arrays() -> None:
    def f(v: jax.Array) -> Any:
        return purlin.all_reduce({"scalar": v[0], "number": 0.5, "empty": v[:0]}, "x")

    x = np.arange(8, dtype=np.float32)
    got = to_numpy(sharded(f, mesh(8), out_specs=P())(x))
    assert got["scalar"] == 28 and got["number"] == 4 and got["empty"].shape == (0,)
    assert got["scalar"].dtype == got["number"].dtype == got["empty"].dtype == np.float32


def test_no_axis_is_the_identity() -> None:
    x = random_array("float32", (8, 4))
    program = sharded(lambda v: purlin.all_reduce(v, ()), mesh(8))
    assert_same_bits(run_counted(program, x, op="all_reduce", calls=0), x)


def test_narrow_dtypes_raise_in_strict_mode() -> None:
    program = sharded(_both("x")[0], mesh(4), out_specs=P())
    with pytest.raises(purlin.FallbackError, match=r"all_reduce cannot run here: .*int4"):
        program(jnp.ones(4, jnp.int4))


@pytest.mark.parametrize("check_vma", (True, False))
def test_narrow_dtypes_go_to_jax_lax(check_vma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PURLIN_FALLBACK")
    x = jnp.asarray(np.arange(8) % 2, jnp.int4)
    ours, theirs = _both("x")
    results = []
    for f in (lambda v: purlin.all_reduce(v, "x", backend="auto"), ours, theirs):
        program = sharded(f, mesh(4), out_specs=P(), check_vma=check_vma)
        results.append(run_counted(program, x, op="all_reduce", calls=0))
    assert results[0].dtype == x.dtype
    assert_same_bits(results[0], results[2])
    assert_same_bits(results[1], results[2])


def test_a_mixed_pytree_falls_back_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PURLIN_FALLBACK")
    x = {"f": np.arange(4, dtype=np.float32), "i": jnp.asarray([0, 1, 1, 1], jnp.int4)}
    got = run_counted(sharded(_both("x")[0], mesh(4), out_specs=P()), x, op="all_reduce", calls=0)
    assert (got["f"], got["i"]) == (6, 3)
    assert (got["f"].dtype, got["i"].dtype) == (np.float32, jnp.int4)
