"""ragged_all_to_all moves slices to where their senders say, and keeps all other rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purlin_jax as purlin
from tests.harness import P, assert_same_bits, random_array, to_numpy
from tests.varlen import ORDER, feed, flat, over, ragged, run_native


@pytest.mark.parametrize("backend", ("purlin", "lax"))
def test_the_example_of_jax_lax(backend: str) -> None:
    numbers = np.array(
        [[[0, 1], [0, 1]], [[1, 2], [1, 1]], [[0, 0], [1, 2]], [[1, 1], [2, 1]]], np.int32
    )

    def f(x: jax.Array, *numbers: jax.Array) -> jax.Array:
        kept = jnp.zeros(4, jnp.int32)
        return purlin.ragged_all_to_all(x, kept, *numbers, axis_name="x", backend=backend)

    x = np.array([[1, 2, 2], [3, 4, 0]], np.int32)
    np.testing.assert_array_equal(over(flat(2), f)(x, *numbers), [[1, 3, 0, 0], [2, 2, 4, 0]])


@pytest.mark.parametrize("backend", ("purlin", "lax"))
@pytest.mark.parametrize("counts", ("int32", "uint8", "uint32"))
def test_several_slices_for_each_rank(counts: str, backend: str) -> None:
    # Slices of the operand may overlap and come in any order; so may places, if not overlap.
    rng = np.random.default_rng(1)
    world, k, rows = 3, 3, 9
    sizes = rng.integers(0, 5, (world, world * k))
    starts = rng.integers(0, rows - sizes + 1)
    expected = sizes.reshape(world, world, k).swapaxes(0, 1).reshape(world, -1)
    room = expected.sum(1).max() + 4
    places = np.zeros_like(sizes)
    for r in range(world):
        order, at = rng.permutation(world * k), rng.integers(0, 4)
        for q, i in (divmod(int(j), k) for j in order):
            places[q, r * k + i] = at
            at += sizes[q, r * k + i]
    x, kept = random_array("int8", (world, rows, 3)), random_array("int8", (world, room, 3), 1)

    def f(v: jax.Array, y: jax.Array, *numbers: jax.Array) -> jax.Array:
        return purlin.ragged_all_to_all(v, y, *numbers, axis_name="x", backend=backend)

    numbers = [v.astype(counts) for v in (starts, sizes, places, expected)]
    calls = {"all_to_all_v": world * k} if backend == "purlin" else {}
    got = run_native(over(flat(world), f), x, kept, *numbers, calls=calls)
    assert_same_bits(got, ragged(x, kept, starts, sizes, places))


def test_an_operand_that_is_the_output_too() -> None:
    # And it is read again: the result must not lie in its memory.
    starts, sizes, places, expected = np.array(
        [[[0, 3], [1, 4]], [[3, 1], [2, 2]], [[4, 0], [0, 4]], [[3, 2], [1, 2]]], np.int32
    )
    x = random_array("int32", (2, 9))

    def f(v: jax.Array, *numbers: jax.Array) -> Any:
        return purlin.ragged_all_to_all(v, v, *numbers, axis_name="x"), v

    got = to_numpy(over(flat(2), f)(x, starts, sizes, places, expected))
    assert_same_bits(got, (ragged(x, x, starts, sizes, places), x))


def test_a_donated_output() -> None:
    ranks = flat(3)
    given = feed(ranks, "some", 6)
    x, kept, *numbers = (given["x"]["a"], given["kept"], *(given[key] for key in ORDER))

    def f(v: jax.Array, y: jax.Array, *numbers: jax.Array) -> jax.Array:
        return purlin.ragged_all_to_all(v, y, *numbers, axis_name="x")

    def addresses(v: jax.Array) -> list[int]:
        return [shard.data.unsafe_buffer_pointer() for shard in v.addressable_shards]

    def rows(v: np.ndarray) -> jax.Array:
        """Shards as they are, not one element each: XLA might copy for a reshape."""
        flat_rows = v.reshape(-1, *v.shape[2:])
        return jax.device_put(flat_rows, jax.NamedSharding(ranks.mesh, P("x")))

    put = jnp.copy(rows(kept))  # whose memory may be numpy's, which XLA does not take over
    before = addresses(put)
    program = jax.shard_map(f, mesh=ranks.mesh, in_specs=P("x"), out_specs=P("x"))
    got = jax.jit(program, donate_argnums=1)(rows(x), put, *map(rows, numbers))
    assert addresses(got) == before
    starts, sizes, places, _ = numbers
    expected = ragged(x, kept, starts, sizes, places)
    assert_same_bits(np.asarray(got).reshape(expected.shape), expected)
