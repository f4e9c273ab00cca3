"""vmap of counted collectives: the same as one call after another, also of their derivatives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purlin_jax as purlin
from tests.harness import VMA, Fn, P, random_array, reordered_2x4, sharded, to_numpy
from tests.varlen import (
    ORDER,
    capacity_of,
    everything,
    everything_expected,
    exchange,
    feed,
    flat,
    gather,
    over,
    ragged,
    reduce,
)
from tests.varlen_dense import LINEAR, dense

RANKS, ROWS, BATCH = flat(3), 4, 3
ROOM = capacity_of(RANKS, ROWS)
GIVEN = [feed(RANKS, name, ROWS, seed=i) for i, name in enumerate(("zipf", "some", "one huge"))]
STACKED = jax.tree.map(lambda *v: np.stack(v, 1), *GIVEN)  # the batch behind the ranks
EACH = pytest.mark.parametrize("name", LINEAR)


def _x(name: str, seed: int = 0) -> np.ndarray:
    """[ranks, batch, rows, 2]."""
    return random_array("float32", (3, BATCH, LINEAR[name].rows(ROWS, ROOM), 2), seed)


def _one_by_one(f: Fn) -> np.ndarray:
    return np.stack([f(i) for i in range(BATCH)], 1)


@pytest.mark.parametrize("backend", ("purlin", "lax"))
@VMA
@EACH
def test_batches(name: str, check_vma: bool, backend: str) -> None:
    linear, x = LINEAR[name], _x(name)

    def f(v: jax.Array, t: Any, every: Any) -> dict[str, jax.Array]:
        def along(axis: int) -> Fn:
            return jax.vmap(linear.run, in_axes=(axis, None), out_axes=0)

        return {
            "data 0": along(0)(v, t),
            "data 1": along(1)(jnp.moveaxis(v, 0, 1), t),
            "data -1": along(-1)(jnp.moveaxis(v, 0, -1), t),
            "counts": jax.vmap(linear.run, in_axes=(None, 0))(v[0], every),
            "both": jax.vmap(linear.run, in_axes=(1, 0))(jnp.moveaxis(v, 0, 1), every),
        }

    with purlin.backend(backend):
        got = to_numpy(over(RANKS, f, check_vma=check_vma)(x, GIVEN[0], STACKED))
    shared = _one_by_one(lambda i: linear.reference(x[:, i], GIVEN[0]))
    expected = {
        **dict.fromkeys(("data 0", "data 1", "data -1"), shared),
        "counts": _one_by_one(lambda i: linear.reference(x[:, 0], GIVEN[i])),
        "both": _one_by_one(lambda i: linear.reference(x[:, i], GIVEN[i])),
    }
    for key, y in expected.items():
        np.testing.assert_array_equal(got[key], y, err_msg=key)


@VMA
@EACH
def test_derivatives(name: str, check_vma: bool) -> None:
    linear, x = LINEAR[name], _x(name)

    def loss(f: Fn) -> Fn:
        return lambda v: (jnp.sin(f(v * v)) ** 2).sum()

    def f(v: jax.Array, t: Any, every: Any) -> Any:
        def gradient(u: jax.Array, counts: Any) -> jax.Array:
            return jax.grad(loss(lambda z: linear.run(z, counts)))(u)

        shared = jax.vmap(gradient, in_axes=(0, None))(v, t)
        mapped = jax.vmap(linear.run)
        return shared, jax.vmap(gradient)(v, every), jax.grad(loss(lambda z: mapped(z, every)))(v)

    got = to_numpy(over(RANKS, f, check_vma=check_vma)(x, GIVEN[0], STACKED))

    def one(i: int, given: Any) -> np.ndarray:
        return np.asarray(jax.grad(loss(dense(linear, given, ROWS)))(x[:, i]))

    own = _one_by_one(lambda i: one(i, GIVEN[i]))
    expected = (_one_by_one(lambda i: one(i, GIVEN[0])), own, own)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@VMA
def test_some_operands_are_batched(check_vma: bool) -> None:
    t = GIVEN[0]
    x, w = random_array("float32", (3, BATCH, ROWS, 2)), random_array("int8", (3, ROWS), 1)
    kept = random_array("float32", (3, BATCH, ROOM, 2), 2)

    def moved(v: jax.Array, y: jax.Array, t: Any) -> jax.Array:
        numbers = (t[key] for key in ORDER)
        return purlin.ragged_all_to_all(v, y, *numbers, axis_name="x")

    def f(v: jax.Array, u: jax.Array, y: jax.Array, t: Any) -> Any:
        def both(a: jax.Array, b: jax.Array) -> Any:
            return purlin.all_to_all_v([a, b], t["sizes"], "x", capacity=ROOM)

        return (
            jax.vmap(both, in_axes=(0, None), out_axes=([0, None], None))(v, u),
            jax.vmap(moved, in_axes=(0, None, None))(v, y[0], t),
            jax.vmap(moved, in_axes=(None, 0, None))(v[0], y, t),
        )

    got = to_numpy(over(RANKS, f, check_vma=check_vma)(x, w, kept, t))
    numbers = [t[key] for key in ("starts", "sizes", "places")]
    exchanged = _one_by_one(lambda i: exchange(x[:, i], t["sizes"], ROOM))
    expected = (
        ([exchanged, exchange(w, t["sizes"], ROOM)], t["sizes"].T),
        _one_by_one(lambda i: ragged(x[:, i], kept[:, 0], *numbers)),
        _one_by_one(lambda i: ragged(x[:, 0], kept[:, i], *numbers)),
    )
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_outside_shard_map() -> None:
    program = jax.jit(jax.vmap(everything(RANKS, ROWS), in_axes=1, out_axes=1))
    got = to_numpy(program(STACKED))
    each = [everything_expected(RANKS, t) for t in GIVEN]
    jax.tree.map(np.testing.assert_array_equal, got, jax.tree.map(lambda *v: np.stack(v, 1), *each))


def test_spmd_axis_name() -> None:
    # Each half of the mesh has an element of the batch, with counts of its own.
    sizes = random_array("uint8", (2, 4, 4)).astype(np.int32) % 3
    x = random_array("float32", (2, 4, 8, 2))

    def f(v: jax.Array, n: jax.Array) -> jax.Array:
        return purlin.all_to_all_v(v[0], n[0], "b", capacity=8)[0][None]

    inner = sharded(f, reordered_2x4(), in_specs=P("b"), out_specs=P("b"))
    got = jax.jit(jax.vmap(inner, spmd_axis_name="a"))(x, sizes)
    expected = [exchange(v, n, 8) for v, n in zip(x, sizes, strict=True)]
    np.testing.assert_array_equal(got, expected)


def test_over_the_axis_of_the_collective() -> None:
    # There is nothing to send.
    t = GIVEN[0]
    x, kept = t["x"]["a"], t["kept"]

    def f(v: jax.Array, y: jax.Array, t: Any) -> Any:
        numbers = (t[key] for key in ORDER)
        return (
            purlin.all_to_all_v(v, t["sizes"], "v", capacity=ROOM)[0],
            purlin.all_gather_v(v, t["size"], "v")[0],
            purlin.reduce_scatter_v(v, t["blocks"], "v")[0],
            purlin.ragged_all_to_all(v, y, *numbers, axis_name="v"),
        )

    before = purlin.native_calls()
    got = to_numpy(jax.jit(jax.vmap(f, axis_name="v"))(x, kept, t))
    assert purlin.native_calls() == before
    expected = (
        exchange(x, t["sizes"], ROOM),
        gather(x, t["size"], 3 * ROWS),
        reduce(x, t["blocks"][0], ROWS),
        ragged(x, kept, t["starts"], t["sizes"], t["places"]),
    )
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
