"""Many counted calls one after another, with other counts each time and others between them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import purlin_jax as purlin
from tests.harness import assert_same_bits, exchanged, random_array, summed, to_numpy
from tests.varlen import exchange, feed, flat, gather, over, patterns, run_native, under


def test_unpaced_calls_among_others() -> None:
    ranks, world, rows = flat(4), 4, 12
    room = world * rows

    def f(v: jax.Array, n: jax.Array) -> Any:
        out, received = purlin.all_to_all_v(v, n, "x", capacity=room)
        total = purlin.psum(out[:4], "x")
        gathered, _ = purlin.all_gather_v(v, n.sum(), "x")
        return out, received, total, purlin.all_to_all(gathered, "x", 0, 0, tiled=True)

    program = over(ranks, f)
    names = list(patterns(world, rows))
    fed = []
    for k in range(32):
        x = random_array("float32", (world, rows, 3), k)
        fed.append((x, feed(ranks, names[k % len(names)], rows)["sizes"]))
    results = [program(*given) for given in fed]
    for (x, sizes), got in zip(fed, to_numpy(results), strict=True):
        out = exchange(x, sizes, room)
        everyone = gather(x, sizes.sum(1), room)
        expected = (
            out,
            sizes.T,
            np.stack([summed(out[:, :4])] * world),
            np.stack(exchanged(everyone, 0, 0)),
        )
        assert_same_bits(got, expected)


@pytest.mark.own_regime
@pytest.mark.parametrize("regime", ("auto", "packet", "staged, rounds"))
def test_two_hundred_steps_of_a_scan(regime: str) -> None:
    # Rows wander: each step has other counts and sends what the one before brought.
    world, rows, steps = 4, 16, 200
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(rows // 2, np.full(2 * world, 0.5 / world), (steps, world))
    sizes = sizes[..., :world].astype(np.int32)
    x = random_array("int32", (world, rows, 2))

    def f(v: jax.Array, every: jax.Array) -> Any:
        def step(u: jax.Array, n: jax.Array) -> Any:
            out, received = purlin.all_to_all_v(u * 3 + 1, n, "x", capacity=world * rows)
            return out[:rows] ^ u, received

        return jax.lax.scan(step, v, every)

    with under(regime):
        calls = {"all_to_all_v": steps * world}
        got = run_native(over(flat(world), f), x, sizes.swapaxes(0, 1), calls=calls)
    for n in sizes:
        x = exchange(x * 3 + 1, n, world * rows)[:, :rows] ^ x
    assert_same_bits(got, (x, sizes.transpose(2, 0, 1)))
