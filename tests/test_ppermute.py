"""ppermute, a row of the layout table like the others, equals jax.lax.ppermute."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purlin_jax as purlin
from tests.harness import P, mesh, reordered_2x4, run_counted, sharded, to_numpy

RING = [(i, (i + 1) % 8) for i in range(8)]
PERMS = {
    "ring": RING,
    "shift without end": RING[:-1],
    "swap": [(0, 5), (5, 0)],
    "self": [(3, 3)],
    "reverse": [(i, 7 - i) for i in range(8)],
    "nobody": [],
}
REGIMES = ("auto", "packet", "staged", "zero_staging")


def _shard(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return (jnp.arange(np.prod(shape)) % 113).reshape(shape).astype(dtype)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", PERMS)
def test_equals_lax(name: str, regime: str) -> None:
    tree = {"a": _shard(8, 5, 3), "b": _shard(16, 2, dtype=jnp.bfloat16), "c": _shard(8) > 40}

    def of(lib: Any) -> Any:
        return sharded(lambda x: lib.ppermute(x, "x", PERMS[name]), mesh(8))

    with purlin.policy(regime):
        got = run_counted(of(purlin), tree, op="ppermute", calls=8)
    jax.tree.map(np.testing.assert_array_equal, got, to_numpy(of(jax.lax)(tree)))


@pytest.mark.parametrize("axis", ("a", "b", ("a", "b"), ("b", "a")))
def test_meshes(axis: Any) -> None:
    n = {"a": 2, "b": 4}.get(axis, 8)
    perm = theirs = [(i, (i + 1) % n) for i in range(n)]
    in_mesh_order = axis
    if axis == ("b", "a"):  # jax.lax.ppermute takes axes in the order of the mesh alone
        in_mesh_order = ("a", "b")
        theirs = [(s % 2 * 4 + s // 2, d % 2 * 4 + d // 2) for s, d in perm]
    x = _shard(16, 3)
    got = sharded(lambda v: purlin.ppermute(v, axis, perm), reordered_2x4())(x)
    want = sharded(lambda v: jax.lax.ppermute(v, in_mesh_order, theirs), reordered_2x4())(x)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("backend", ("purlin", "lax"))
def test_derivatives_and_vmap(backend: str) -> None:
    x = _shard(8, 4, 3)

    def of(lib: Any) -> Any:
        def f(v: jax.Array) -> jax.Array:
            return jax.vmap(lambda e: lib.ppermute(e, "x", RING[:-2]), 1, 1)(v) ** 2

        program = sharded(f, mesh(8))
        return jax.jit(jax.grad(lambda v: (program(v) * (v + 1)).sum()))

    with purlin.backend(backend):
        np.testing.assert_array_equal(of(purlin)(x), of(jax.lax)(x))


def test_scalars_and_empty_trees() -> None:
    f = sharded(lambda x: purlin.ppermute((x[0], ()), "x", RING)[0][None], mesh(8))
    np.testing.assert_array_equal(f(_shard(8)), np.roll(np.arange(8), 1))


def test_a_ring_of_steps() -> None:
    """Each rank sees every rank's array once: the pattern of ring attention."""

    def f(x: jax.Array) -> jax.Array:
        def step(carry: Any, _: Any) -> Any:
            block, total = carry
            return (purlin.ppermute(block, "x", RING), total + block), None

        return jax.lax.scan(step, (x, jnp.zeros_like(x)), None, length=8)[0][1]

    x = _shard(8, 6)
    got = run_counted(sharded(f, mesh(8)), x, op="ppermute", calls=64)
    np.testing.assert_array_equal(got, np.broadcast_to(np.asarray(x).sum(0), (8, 6)))


@pytest.mark.parametrize(
    ("perm", "says"),
    (
        ([(0, 8)], r"\(0, 8\) names a rank outside the 8"),
        ([(0, 1), (2, 1)], "names a rank twice"),
        ([(0, 1), (0, 2)], "names a rank twice"),
    ),
)
def test_advice(perm: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(
            jax.shard_map(
                lambda x: purlin.ppermute(x, "x", perm),
                mesh=mesh(8),
                in_specs=P("x"),
                out_specs=P("x"),
            ),
            _shard(8),
        )
