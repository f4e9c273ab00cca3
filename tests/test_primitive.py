"""Derivatives of the primitive: the same as those of jax.lax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
    sharded,
)


def _x(*shape: int) -> np.ndarray:
    return random_array("float32", shape or (16, 8))


@VMA
@EACH_OP
def test_grad_outside_shard_map(op: str, check_vma: bool) -> None:
    def build(c: Fn) -> Fn:
        inner = sharded(mixed(c), mesh(4), check_vma=check_vma)
        return jax.jit(jax.value_and_grad(lambda v: (inner(v) * _x()).sum()))

    assert_like_lax(build, _x(), op=op)


@VMA
@EACH_OP
def test_grad_inside_shard_map(op: str, check_vma: bool) -> None:
    def build(c: Fn) -> Fn:
        return sharded(jax.grad(lambda v: mixed(c)(v).sum()), mesh(4), check_vma=check_vma)

    assert_like_lax(build, _x(), op=op)


def test_grad_of_an_invariant_sum_outside() -> None:
    def build(c: Fn) -> Fn:
        inner = sharded(lambda v: jnp.sin(c(v)), mesh(4), out_specs=P())
        return jax.jit(jax.grad(lambda v: (inner(v) ** 2).sum()))

    assert_like_lax(build, _x(), op="all_reduce")


@EACH_OP
def test_grad_of_an_operand_that_does_not_vary(op: str) -> None:
    # Every rank contributes the same array, so the gradient counts it once for each.
    def build(c: Fn) -> Fn:
        inner = sharded(lambda v: jnp.sin(c(v)).sum() * v, mesh(4), in_specs=P(), out_specs=P("x"))
        outside = jax.grad(lambda v: (inner(v) ** 2).sum())
        inside = sharded(
            jax.grad(lambda v: jax.lax.psum(mixed(c)(v).sum(), "x")),
            mesh(4),
            in_specs=P(),
            out_specs=P(),
        )
        return lambda v: (outside(v), inside(v))

    assert_like_lax(build, _x(), op=op)


@VMA
def test_grad_of_a_sum_over_groups(check_vma: bool) -> None:
    # jax.lax has no groups under check_vma: its gradient without is the reference for both.
    groups = [[0, 3], [2, 1]]
    weights = _x()

    def grad(f: Fn, vma: bool) -> np.ndarray:
        inner = sharded(lambda v: jnp.sin(f(v, "x", axis_index_groups=groups)) * v, mesh(4),
                        check_vma=vma)  # fmt: skip
        return np.asarray(jax.grad(lambda v: (inner(v) * weights).sum())(_x()))

    got = grad(purlin.all_reduce, check_vma)
    np.testing.assert_allclose(got, grad(jax.lax.psum, False), rtol=1e-5, atol=1e-5)


@VMA
@EACH_OP
def test_jvp(op: str, check_vma: bool) -> None:
    def build(c: Fn) -> Fn:
        return sharded(
            lambda v: jax.jvp(mixed(c), (v,), (jnp.cos(v),)), mesh(4), check_vma=check_vma
        )

    assert_like_lax(build, _x(), op=op)


@EACH_OP
def test_linearize_and_second_derivative(op: str) -> None:
    def linearized(c: Fn) -> Fn:
        def f(v: jax.Array) -> Any:
            out, tangent = jax.linearize(mixed(c), v)
            return out, tangent(jnp.cos(v))

        return sharded(f, mesh(4))

    def second(c: Fn) -> Fn:
        inner = sharded(mixed(c), mesh(4))
        first = jax.grad(lambda v: (inner(v) ** 2).sum())
        return jax.jit(lambda v: jax.jvp(first, (v,), (jnp.ones_like(v),))[1])

    assert_like_lax(linearized, _x(), op=op)
    assert_like_lax(second, _x(), op=op)


@VMA
@EACH_OP
def test_grad_of_some_leaves(op: str, check_vma: bool) -> None:
    # The leaves travel in one call; only "f" and "g" have tangents, in the transpose only "f".
    other = random_array("int8" if op == "all_to_all" else "float32", (16, 8), 1)

    def build(c: Fn) -> Fn:
        def f(t: Any, frozen: jax.Array) -> jax.Array:
            y = c({"f": t["f"], "frozen": frozen, "g": t["g"]})
            return y["f"].sum() * t["f"] + (y["frozen"].sum() % 3).astype(jnp.float32)

        inner = sharded(f, mesh(4), in_specs=(P("x"), P("x")), check_vma=check_vma)
        return jax.jit(jax.value_and_grad(lambda t, frozen: (inner(t, frozen) ** 2).sum()))

    assert_like_lax(build, {"f": _x(), "g": _x(16, 4)}, other, op=op)


def test_grad_beside_an_integer_leaf() -> None:
    def build(c: Fn) -> Fn:
        inner = sharded(lambda t: c(t)["f"] * _x(8, 4).sum(), mesh(4))
        return jax.grad(lambda t: (inner(t) ** 2).sum(), allow_int=True)

    tree = {"f": _x(), "i": random_array("int32", (16, 8))}
    got, expected = (build(c)(tree) for c in collective_pair("all_to_all"))
    assert got["i"].dtype == expected["i"].dtype == jax.dtypes.float0
    np.testing.assert_allclose(got["f"], expected["f"], rtol=1e-5)
