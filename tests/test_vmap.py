"""vmap of the primitive, inside and outside jax.shard_map: the same results as jax.lax."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import purlin_jax as purlin
from tests.harness import (
    EACH_OP,
    VMA,
    Fn,
    P,
    assert_like_lax,
    collective_pair,
    mesh,
    mixed,
    random_array,
    reordered_2x4,
    sharded,
)


def _x(*shape: int) -> np.ndarray:
    return random_array("float32", shape or (16, 8))


@VMA
@EACH_OP
@pytest.mark.parametrize("in_axis", (0, 2))
def test_vmap_inside(op: str, in_axis: int, check_vma: bool) -> None:
    def build(c: Fn) -> Fn:
        mapped = jax.vmap(c, in_axes=in_axis, out_axes=1)
        return sharded(lambda v: v.sum() * mapped(v), mesh(4), check_vma=check_vma)

    # The mapped axis is the array's first or last; the collective sees the other two.
    assert_like_lax(build, _x(12, 8, 8), op=op)


@EACH_OP
def test_vmap_of_some_leaves(op: str) -> None:
    def build(c: Fn) -> Fn:
        def f(v: jax.Array, w: jax.Array) -> Any:
            moved = jax.vmap(lambda a, b: c([a, b]), in_axes=(0, None), out_axes=[1, None])(v, w)
            return [v.sum() * y for y in moved]

        return sharded(f, mesh(4), in_specs=(P("x"), P("x")))

    assert_like_lax(build, _x(12, 8, 8), _x(16, 8), op=op)


@EACH_OP
def test_vmap_inside_twice_with_grad(op: str) -> None:
    def build(c: Fn) -> Fn:
        twice = jax.vmap(jax.vmap(mixed(c), in_axes=2, out_axes=0), in_axes=0, out_axes=3)
        return sharded(jax.grad(lambda v: (twice(v) ** 2).sum()), mesh(4))

    assert_like_lax(build, _x(8, 3, 8, 5), op=op)


@VMA
@EACH_OP
def test_vmap_outside(op: str, check_vma: bool) -> None:
    def build(c: Fn) -> Fn:
        inner = sharded(lambda v: v.sum() * c(v), mesh(4), check_vma=check_vma)
        return jax.jit(jax.vmap(inner, in_axes=2, out_axes=1))

    assert_like_lax(build, _x(16, 8, 3), op=op)


@VMA
@EACH_OP
def test_vmap_outside_with_spmd_axis_name(op: str, check_vma: bool) -> None:
    def build(c: Fn) -> Fn:
        inner = sharded(
            lambda v: v.sum() * c(v),
            reordered_2x4(),
            in_specs=P("b"),
            out_specs=P("b"),
            check_vma=check_vma,
        )
        return jax.jit(jax.vmap(inner, spmd_axis_name="a"))

    assert_like_lax(build, _x(2, 16, 8), op=op, axis="b")


@EACH_OP
def test_vmap_over_the_axis_of_the_collective(op: str) -> None:
    ours, theirs = (jax.vmap(c, axis_name="v") for c in collective_pair(op, "v"))
    before = purlin.native_calls()
    x = _x(4, 8, 8)
    np.testing.assert_array_equal(ours(x), theirs(x))
    assert purlin.native_calls() == before  # nothing to send


@EACH_OP
def test_vmap_over_the_axis_of_the_collective_in_shard_map(op: str) -> None:
    # With check_vma, jax.lax itself ends in an assertion (0.10 to 0.12).
    ours, theirs = (
        sharded(jax.vmap(c, axis_name="v"), mesh(4), check_vma=False)
        for c in collective_pair(op, "v")
    )
    x = _x(16, 16, 16)
    np.testing.assert_array_equal(ours(x), theirs(x))


def test_axes_of_vmap_and_mesh_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> Fn:
        summed = jax.vmap(lambda v: purlin.psum(v, ("x", "v")), axis_name="v")
        return sharded(summed, mesh(4), check_vma=False)

    x = _x(16, 4)
    with pytest.raises(purlin.FallbackError, match="belong to a vmap and the others to the mesh"):
        program()(x)
    monkeypatch.delenv("PURLIN_FALLBACK")
    np.testing.assert_allclose(program()(x), np.tile(x.sum(0), (16, 1)), rtol=1e-6)


@pytest.mark.parametrize("op", ("max", "prod", "xor"))
def test_reduce_scatter_over_the_axis_of_a_vmap(op: str) -> None:
    x = np.arange(1, 33, dtype=np.int32).reshape(4, 4, 2)
    fold = {"max": np.maximum, "prod": np.multiply, "xor": np.bitwise_xor}[op]
    scattered = jax.vmap(lambda v: purlin.reduce_scatter(v, "v", op, tiled=True), axis_name="v")
    np.testing.assert_array_equal(scattered(x), fold.reduce(x).reshape(4, 1, 2))
