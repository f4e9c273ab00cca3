"""vmap of the primitive, inside and outside jax.shard_map: the same results as jax.lax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.harness import (
    Fn,
    P,
    assert_like_lax,
    collective_pair,
    mesh,
    random_array,
    reordered_2x4,
    sharded,
)

VMA = pytest.mark.parametrize("check_vma", (True, False))
EACH_OP = pytest.mark.parametrize("op", ("all_to_all", "all_reduce"))


def _x(*shape: int) -> np.ndarray:
    return random_array("float32", shape or (16, 8))


def _mixed(c: Fn) -> Fn:
    """A nonlinear function around the collective, whose result varies over the mesh."""
    return lambda v: jnp.sin(c(v * v)).sum() * jnp.cos(v)


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
        twice = jax.vmap(jax.vmap(_mixed(c), in_axes=2, out_axes=0), in_axes=0, out_axes=3)
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
    ours, _ = collective_pair(op, "v")
    with pytest.raises(NotImplementedError, match=r"use jax\.lax for axes that vmap names"):
        jax.vmap(ours, axis_name="v")(_x(4, 8, 8))


@VMA
@EACH_OP
@pytest.mark.parametrize("axis", ("v", ("x", "v")), ids=str)
def test_vmap_over_the_axis_of_the_collective_in_shard_map(
    axis: Any, op: str, check_vma: bool
) -> None:
    ours, _ = collective_pair(op, axis)
    inside = sharded(jax.vmap(ours, axis_name="v"), mesh(4), check_vma=check_vma)
    with pytest.raises(NotImplementedError, match=rf"purlin\.{op} over axis 'v'"):
        inside(_x(16, 16, 16))
