"""Transformations of each collective beyond grad and vmap alone: the same results as jax.lax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purlin_jax as purlin
from tests.harness import (
    EACH_OP,
    VMA,
    Fn,
    P,
    assert_like_lax,
    kept,
    mesh,
    mixed,
    native_collectives,
    random_array,
    reordered_2x4,
    run_counted,
    sharded,
)

X = random_array("float32", (16, 8))
SMALL = random_array("float32", (8, 2))
GROUPS = [[0, 3], [2, 1]]


def _step(c: Fn) -> Fn:
    return lambda v: jnp.tanh(v + kept(c)(v))


@VMA
@EACH_OP
def test_vjp(op: str, check_vma: bool) -> None:
    def build(c: Fn) -> Fn:
        def f(v: jax.Array) -> Any:
            out, pull = jax.vjp(mixed(c), v)
            return out, pull(jnp.cos(out))

        return sharded(f, mesh(4), check_vma=check_vma)

    assert_like_lax(build, X, op=op)


@EACH_OP
@pytest.mark.parametrize("jacobian", (jax.jacfwd, jax.jacrev, jax.hessian))
def test_jacobians(op: str, jacobian: Fn) -> None:
    # Both map the collective over a basis: by vmap of its derivative.
    def build(c: Fn) -> Fn:
        f = mixed(c)
        inner = (lambda v: f(v).sum()) if jacobian is jax.hessian else f
        return sharded(lambda v: jacobian(inner)(v)[None], mesh(2))

    assert_like_lax(build, SMALL, op=op)


@VMA
@EACH_OP
def test_linear_transpose(op: str, check_vma: bool) -> None:
    def build(c: Fn) -> Fn:
        def f(v: jax.Array) -> Any:
            shape = jax.eval_shape(c, v)
            ct = jnp.arange(1.0, shape.size + 1).reshape(shape.shape)
            if check_vma and op != "all_reduce":  # as the result of the collective is typed
                ct = jax.lax.pcast(ct, "x", to="varying")
            return kept(c)(v) + jax.linear_transpose(c, v)(ct)[0]

        return sharded(f, mesh(4), check_vma=check_vma)

    assert_like_lax(build, X, op=op)


@VMA
@EACH_OP
def test_inside_custom_derivatives(op: str, check_vma: bool) -> None:
    # The backward pass is the user's own, and holds a collective too.
    def build(c: Fn) -> Fn:
        once = mixed(c)

        @jax.custom_vjp
        def by_vjp(v: jax.Array) -> jax.Array:
            return once(v)

        by_vjp.defvjp(lambda v: (once(v), v), lambda v, ct: (once(v) * ct * 3,))

        @jax.custom_jvp
        def by_jvp(v: jax.Array) -> jax.Array:
            return once(v)

        by_jvp.defjvp(lambda primals, tangents: (once(*primals), once(*primals) * tangents[0]))

        def f(v: jax.Array) -> Any:
            return jax.grad(lambda u: (by_vjp(u) + by_jvp(u * 2)).sum())(v)

        return sharded(f, mesh(4), check_vma=check_vma)

    assert_like_lax(build, X, op=op)


@VMA
@EACH_OP
def test_grad_of_scan(op: str, check_vma: bool) -> None:
    def build(c: Fn) -> Fn:
        def f(v: jax.Array) -> Any:
            def body(u: jax.Array, k: jax.Array) -> Any:
                u = _step(c)(u * k)
                return u, u.sum()

            last, sums = jax.lax.scan(body, v, jnp.arange(1.0, 4.0))
            return last * sums.sum()

        inner = sharded(f, mesh(4), check_vma=check_vma)
        return jax.jit(jax.grad(lambda v: (inner(v) ** 2).sum()))

    assert_like_lax(build, X, op=op)


@VMA
@EACH_OP
def test_jvp_of_while_loop(op: str, check_vma: bool) -> None:
    def build(c: Fn) -> Fn:
        def f(v: jax.Array) -> jax.Array:
            def body(state: Any) -> Any:
                return state[0] + 1, _step(c)(state[1])

            return jax.lax.while_loop(lambda state: state[0] < 3, body, (jnp.int32(0), v))[1]

        return sharded(lambda v: jax.jvp(f, (v,), (jnp.cos(v),)), mesh(4), check_vma=check_vma)

    assert_like_lax(build, X, op=op)


@VMA
@EACH_OP
@pytest.mark.parametrize("branch", (True, False))
def test_grad_of_cond(op: str, branch: bool, check_vma: bool) -> None:
    def build(c: Fn) -> Fn:
        def f(v: jax.Array, flag: jax.Array) -> jax.Array:
            return jax.lax.cond(flag, _step(c), lambda u: jnp.sin(u) * 2, v) + _step(c)(v)

        inner = sharded(f, mesh(4), in_specs=(P("x"), P()), check_vma=check_vma)
        return jax.jit(jax.grad(lambda v, flag: (inner(v, flag) ** 2).sum()))

    assert_like_lax(build, X, np.bool_(branch), op=op)


@EACH_OP
@pytest.mark.parametrize("policy", ("everything_saveable", "nothing_saveable"))
def test_checkpoint_policies(op: str, policy: str) -> None:
    saved = getattr(jax.checkpoint_policies, policy)

    def build(c: Fn) -> Fn:
        inner = sharded(jax.checkpoint(mixed(c), policy=saved), mesh(4))
        return jax.jit(jax.grad(lambda v: (inner(v) ** 2).sum()))

    # Where nothing is saved, forward once more, unless XLA finds that it did that already.
    once = policy == "everything_saveable"
    assert_like_lax(build, X, op=op, calls=_calls(op, 1) if once else None)


def _calls(op: str, forward: int) -> int:
    """Native calls of `op` on four ranks, of which all_to_all alone is its own transpose."""
    return 4 * (forward + (op == "all_to_all"))


@VMA
@EACH_OP
def test_grad_of_vmap_with_spmd_axis_name(op: str, check_vma: bool) -> None:
    def build(c: Fn) -> Fn:
        inner = sharded(
            mixed(c), reordered_2x4(), in_specs=P("b"), out_specs=P("b"), check_vma=check_vma
        )
        mapped = jax.vmap(inner, spmd_axis_name="a")
        return jax.jit(jax.grad(lambda v: (mapped(v) ** 2).sum()))

    assert_like_lax(build, random_array("float32", (2, 16, 8)), op=op, axis="b")


WITH_GROUPS = {
    "all_to_all": (
        lambda v: purlin.all_to_all(v, "x", 1, 0, axis_index_groups=GROUPS, tiled=True),
        lambda v: jax.lax.all_to_all(v, "x", 1, 0, axis_index_groups=GROUPS, tiled=True),
    ),
    "all_gather": (
        lambda v: purlin.all_gather(v, "x", axis_index_groups=GROUPS, axis=1),
        lambda v: jax.lax.all_gather(v, "x", axis_index_groups=GROUPS, axis=1),
    ),
    "reduce_scatter": (
        lambda v: purlin.psum_scatter(
            v, "x", scatter_dimension=1, axis_index_groups=GROUPS, tiled=True
        ),
        lambda v: jax.lax.psum_scatter(
            v, "x", scatter_dimension=1, axis_index_groups=GROUPS, tiled=True
        ),
    ),
}


@pytest.mark.parametrize("op", WITH_GROUPS)
def test_grad_and_vmap_with_groups(op: str) -> None:
    def run(mapped: Fn) -> Fn:
        inner = sharded(mapped, mesh(4), out_specs=P(None, "x"), check_vma=False)
        return jax.jit(jax.grad(lambda v: (inner(v) ** 2).sum()))

    x = random_array("float32", (16, 8, 3))
    ours, theirs = WITH_GROUPS[op]
    mapped = jax.vmap(mixed(ours), in_axes=2, out_axes=0)
    got = run_counted(run(mapped), x, op=op, calls=_calls(op, 1))
    # jax.lax does not map its all_to_all with groups.
    expected = np.asarray(run(lambda v: jnp.stack([mixed(theirs)(v[..., i]) for i in range(3)]))(x))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@VMA
@pytest.mark.parametrize("axis", (0, 1))
@pytest.mark.parametrize("axes", ("x", ("b", "a")), ids=str)
def test_all_gather_typed_as_equal_on_all(axes: Any, axis: int, check_vma: bool) -> None:
    # Its transpose is the own block of the cotangent, and no collective.
    grid = mesh(4) if axes == "x" else reordered_2x4()

    def build(lib: Any) -> Fn:
        def f(v: jax.Array) -> Any:
            def gathered(u: jax.Array) -> jax.Array:
                return lib.all_gather(u * u, axes, axis=axis, tiled=True, to="invarying")

            out, pull = jax.vjp(gathered, v)
            return out, pull(jnp.sin(out))[0]

        specs = (P(), P(axes))
        return sharded(f, grid, in_specs=P(axes), out_specs=specs, check_vma=check_vma)

    got = run_counted(build(purlin), X, op="all_gather", calls=grid.size)
    assert not native_collectives(build(purlin).lower(X).compile().as_text())
    expected = build(jax.lax)(X)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
