"""The collectives on GPUs equal jax.lax or a reference, in each regime and at every size."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import purlin_jax as purlin
from tests.gpu.harness import gpus, sharded

pytestmark = pytest.mark.gpu

REGIMES = ("packet", "zero_staging")


def _run(f: Any, x: Any, mesh: Any, regime: str, op: str, **kwargs: Any) -> Any:
    with purlin.policy(regime):
        before = purlin.native_regimes().get((op, regime), 0)
        y = jax.tree.map(np.asarray, sharded(f, mesh, **kwargs)(x))
        assert purlin.native_regimes()[op, regime] - before == mesh.size
    return y


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("axes", [(0, 0), (0, 1), (1, 2), (2, 0), (2, 1)])
def test_all_to_all(regime: str, dtype: str, axes: tuple[int, int]) -> None:
    mesh = gpus()
    rng = np.random.default_rng(0)
    shape = (mesh.size * mesh.size * 3, mesh.size * 5, mesh.size * 7)
    x = jnp.asarray(rng.integers(0, 2, shape), dtype)
    ours = lambda v: purlin.all_to_all(v, "x", *axes, tiled=True)  # noqa: E731
    theirs = lambda v: jax.lax.all_to_all(v, "x", *axes, tiled=True)  # noqa: E731
    y = _run(ours, x, mesh, regime, "all_to_all")
    np.testing.assert_array_equal(y, np.asarray(sharded(theirs, mesh)(x)))


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_gather_and_scatter(regime: str, axis: int, op: str) -> None:
    mesh = gpus()
    n = mesh.size
    x = jnp.asarray(
        np.random.default_rng(0).integers(0, 16, (n * n * 3, n * 5, n * 2)), jnp.float32
    )

    def of(lib: Any) -> Any:
        if op == "all_gather":
            return lambda v: lib.all_gather(v, "x", axis=axis, tiled=True)
        return lambda v: lib.psum_scatter(v, "x", scatter_dimension=axis, tiled=True)

    y = _run(of(purlin), x, mesh, regime, op)
    np.testing.assert_array_equal(y, np.asarray(sharded(of(jax.lax), mesh)(x)))


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("items", [1, 2, 3, 7, 8, 127, 1000, 4097, 65537, 131072])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_all_reduce_in_rank_order(regime: str, items: int, dtype: Any) -> None:
    mesh = gpus()
    rng = np.random.default_rng(items)
    x = rng.normal(size=(mesh.size, items)).astype(dtype)
    y = _run(lambda v: purlin.all_reduce(v, "x"), jnp.asarray(x), mesh, regime, "all_reduce")
    expected = x[0].astype(np.float32)
    for row in x[1:]:
        expected = expected + row.astype(np.float32)
    for row in y:  # the same bits on all ranks
        np.testing.assert_array_equal(row, expected.astype(dtype))


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("items", [1 << 20, 10_556_587])
def test_large_and_odd(regime: str, items: int) -> None:
    if regime == "packet" and items > 1 << 17:
        regime = "zero_staging"  # packets are for small arrays
    mesh = gpus()
    x = np.arange(items, dtype=np.float32) % 251 + np.arange(mesh.size, dtype=np.float32)[:, None]
    y = _run(lambda v: purlin.all_reduce(v, "x"), jnp.asarray(x), mesh, regime, "all_reduce")
    np.testing.assert_array_equal(y, np.broadcast_to(x.sum(0), y.shape))


@pytest.mark.parametrize("regime", REGIMES)
def test_bits_that_arithmetic_would_lose(regime: str) -> None:
    mesh = gpus()
    x = np.array([1e-40, -0.0, np.inf, 3.0], np.float32)
    y = _run(
        lambda v: purlin.all_reduce(v, "x"),
        jnp.asarray(np.tile(x, mesh.size)),
        mesh,
        regime,
        "all_reduce",
    )
    expected = x.copy()
    for _ in range(mesh.size - 1):
        expected = expected + x
    np.testing.assert_array_equal(y.view(np.uint32), np.tile(expected, mesh.size).view(np.uint32))


@pytest.mark.parametrize("regime", REGIMES)
def test_operands_travel_together(regime: str) -> None:
    mesh = gpus()
    n = mesh.size
    tree = [jnp.arange(n * n * k * 3.0).reshape(n * n, k * 3) for k in (1, 2, 5)]
    y = _run(
        lambda v: purlin.all_to_all(v, "x", 0, 1, tiled=True), tree, mesh, regime, "all_to_all"
    )
    expected = sharded(
        lambda v: jax.tree.map(lambda u: jax.lax.all_to_all(u, "x", 0, 1, tiled=True), v), mesh
    )(tree)
    for a, b in zip(y, expected, strict=True):
        np.testing.assert_array_equal(a, np.asarray(b))


@pytest.mark.multi_gpu
def test_reversed_mesh_shares_no_rank_with_the_device_order() -> None:
    n = len(jax.devices("gpu"))
    for order in (range(n), range(n)[::-1]):
        mesh = gpus(order)
        x = jnp.arange(n * n * 4.0)
        for f, g in (
            (lambda v: purlin.all_to_all(v, "x", 0, 0, tiled=True),
             lambda v: jax.lax.all_to_all(v, "x", 0, 0, tiled=True)),
            (lambda v: purlin.all_reduce(v, "x"), lambda v: jax.lax.psum(v, "x")),
        ):  # fmt: skip
            np.testing.assert_array_equal(sharded(f, mesh)(x), sharded(g, mesh)(x))


def test_ulysses_equals_one_device() -> None:
    mesh = gpus(names=("sp",))
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 64, 8, 32)) for key in keys)
    with jax.default_matmul_precision("highest"):
        f = jax.jit(lambda *a: purlin.ulysses_attention(*a, axis_name="sp", mesh=mesh))
        expected = jax.nn.dot_product_attention(q, k, v)
        np.testing.assert_allclose(f(q, k, v), expected, atol=2e-5)


def test_empty_arrays_launch_nothing() -> None:
    mesh = gpus()
    y = sharded(lambda v: purlin.all_reduce(v, "x"), mesh)(jnp.zeros((mesh.size, 0)))
    assert y.shape == (mesh.size, 0)
