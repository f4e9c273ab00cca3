"""Collectives inside scan, while_loop, cond and checkpoint: the same results as jax.lax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.harness import (
    EACH_OP,
    VMA,
    Fn,
    P,
    assert_like_lax,
    kept,
    mesh,
    random_array,
    sharded,
)


def _x(*shape: int) -> np.ndarray:
    return random_array("float32", shape or (16, 8))


def _step(c: Fn) -> Fn:
    """A step of a loop: it keeps shape and type."""
    return lambda v: jnp.tanh(v + kept(c)(v))


@VMA
@EACH_OP
def test_scan(op: str, check_vma: bool) -> None:
    def build(c: Fn) -> Fn:
        def f(v: jax.Array) -> Any:
            return jax.lax.scan(lambda u, k: (_step(c)(u * k), u.sum()), v, jnp.arange(1.0, 4.0))[0]

        return sharded(f, mesh(4), check_vma=check_vma)

    assert_like_lax(build, _x(), op=op)


@VMA
@EACH_OP
def test_grad_of_checkpoint_in_scan(op: str, check_vma: bool) -> None:
    def build(c: Fn) -> Fn:
        body = jax.checkpoint(_step(c))

        def f(v: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda u, _: (body(u), None), v, None, length=3)[0]

        inner = sharded(f, mesh(4), check_vma=check_vma)
        return jax.jit(jax.grad(lambda v: (inner(v) ** 2).sum()))

    assert_like_lax(build, _x(), op=op)


@EACH_OP
def test_while_loop(op: str) -> None:
    def build(c: Fn) -> Fn:
        def f(v: jax.Array) -> jax.Array:
            def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                return state[0] + 1, _step(c)(state[1])

            return jax.lax.while_loop(lambda state: state[0] < 5, body, (jnp.int32(0), v))[1]

        return sharded(f, mesh(4))

    assert_like_lax(build, _x(), op=op)


@EACH_OP
@pytest.mark.parametrize("branch", (True, False))
def test_cond(op: str, branch: bool) -> None:
    def build(c: Fn) -> Fn:
        def f(v: jax.Array, flag: jax.Array) -> jax.Array:
            return jax.lax.cond(flag, _step(c), lambda u: _step(c)(-u * 2), v)

        return sharded(f, mesh(4), in_specs=(P("x"), P()))

    assert_like_lax(build, _x(), np.bool_(branch), op=op)
