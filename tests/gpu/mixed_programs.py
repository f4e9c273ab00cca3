"""Programs that mix purlin with jax.lax; each exits 0 if every value was right.

python -m tests.gpu.mixed_programs NAME COUNT

They take the devices that JAX prefers, so JAX_PLATFORMS=cpu runs them on virtual CPU devices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

import purlin_jax as purlin
from tests.gpu.harness import P, sharded

# Values stay below it: exact in TF32, and so are the sums of some of them.
PRIME = 251
STEPS = 100  # of a loop in one program
IN_FLIGHT = 20  # programs before a wait: XLA's CPU client can stall with more than 32
COLUMNS = 16
Arrays = tuple[np.ndarray, np.ndarray]


def all_devices() -> Mesh:
    return Mesh(np.array(jax.devices()), ("x",))


def _start(rows: int) -> Arrays:
    rng = np.random.default_rng(0)
    shape = (rows, COLUMNS)
    return tuple(rng.integers(0, PRIME, shape).astype(np.float32) for _ in range(2))  # type: ignore[return-value]


def _loops(step: Any, expected: Callable[[int, Arrays], Arrays], count: int, mesh: Mesh) -> None:
    """Run `step` of two arrays `count` times, in programs of STEPS, and compare each program."""

    def body(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        numbers = jnp.arange(STEPS, dtype=jnp.float32)
        return jax.lax.scan(lambda c, i: (step(i, c), None), (x, y), numbers)[0]

    program = sharded(body, mesh)
    state = _start(mesh.size**2)
    assert "purlin_collective" in (program.lower(*state).compile().as_text() or "")
    found = [state]
    for i in range(-(-count // STEPS)):
        found.append(program(*found[-1]))
        if i % IN_FLIGHT == 0:
            jax.block_until_ready(found[-1])
    for number, after in enumerate(found[1:]):
        for i in range(STEPS):
            state = expected(i, state)
        for mine, right in zip(after, state, strict=True):
            np.testing.assert_array_equal(mine, right, f"after {(number + 1) * STEPS} steps")


def _exchanged(x: np.ndarray, n: int) -> np.ndarray:
    return x.reshape(n, n, -1, COLUMNS).swapaxes(0, 1).reshape(x.shape)


def _summed(x: np.ndarray, n: int) -> np.ndarray:
    return np.tile(x.reshape(n, -1, COLUMNS).sum(0), (n, 1))


def beside(count: str) -> None:
    """jax.lax's collectives, which XLA may start early, beside purlin's, with a product between."""
    mesh = all_devices()
    n = mesh.size
    turn = np.roll(np.eye(COLUMNS, dtype=np.float32), 1, 0)  # a product with it is exact

    def step(i: jax.Array, state: Any) -> Any:
        x, y = state
        theirs = jax.lax.psum(x, "x")
        ours = purlin.all_reduce(y, "x")
        gathered = jax.lax.all_gather(y, "x", tiled=True)
        exchanged = purlin.all_to_all(x, "x", 0, 0, tiled=True)
        scattered = jax.lax.psum_scatter(gathered + i, "x", tiled=True) / n  # y + i
        product = (x @ turn) @ turn
        return (theirs + 3 * exchanged + product + i) % PRIME, (ours + 5 * scattered + 1) % PRIME

    def expected(i: int, state: Arrays) -> Arrays:
        x, y = state
        z = _summed(x, n) + 3 * _exchanged(x, n) + x @ turn @ turn + i
        return z % PRIME, (_summed(y, n) + 5 * (y + i) + 1) % PRIME

    _loops(step, expected, int(count), mesh)


def rings(count: str) -> None:
    """ppermute in both directions between calls of purlin, which meet the same peers."""
    mesh = all_devices()
    n = mesh.size
    right = [(r, (r + 1) % n) for r in range(n)]
    left = [(b, a) for a, b in right]

    def step(i: jax.Array, state: Any) -> Any:
        x, y = state
        y = jax.lax.ppermute(y, "x", right) + i
        total = purlin.all_reduce(x, "x")
        x = jax.lax.ppermute(total + x, "x", left)
        y = purlin.all_to_all(y, "x", 0, 0, tiled=True)
        return (x + jax.lax.ppermute(y, "x", right)) % PRIME, (y + 1) % PRIME

    def expected(i: int, state: Arrays) -> Arrays:
        x, y = state
        rows = len(x) // n  # of a rank
        y = _exchanged(np.roll(y, rows, 0) + i, n)
        x = np.roll(_summed(x, n) + x, -rows, 0)
        return (x + np.roll(y, rows, 0)) % PRIME, (y + 1) % PRIME

    _loops(step, expected, int(count), mesh)


def inserted(count: str) -> None:
    """Products of sharded matrices in plain jit, whose collectives XLA adds, around purlin's."""
    mesh = all_devices()
    n = mesh.size
    size = 16 * n
    rows, columns, whole = (NamedSharding(mesh, s) for s in (P("x"), P(None, "x"), P()))
    # A permutation of the columns, cut along the sum: XLA must add up or gather.
    move = np.eye(size, dtype=np.float32)[np.random.default_rng(1).permutation(size)]
    ours = jax.shard_map(
        lambda v: purlin.all_to_all(v, "x", 0, 0, tiled=True) + purlin.all_reduce(v, "x"),
        mesh=mesh, in_specs=P("x"), out_specs=P("x"),
    )  # fmt: skip

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        def step(x: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            y = jax.lax.with_sharding_constraint(x, columns) @ w
            y = ours(jax.lax.with_sharding_constraint(y, rows)) % PRIME
            z = jax.lax.with_sharding_constraint(y, whole)  # a gather
            y = jax.lax.with_sharding_constraint(y @ w + z.T[:1] + i, rows)
            return y % PRIME, None

        return jax.lax.scan(step, x, jnp.arange(STEPS, dtype=jnp.float32))[0]

    start = np.random.default_rng(0).integers(0, PRIME, (size, size)).astype(np.float32)
    x, w, right = jax.device_put(start, rows), jax.device_put(move, rows), start
    compiled = jax.jit(program, out_shardings=rows).lower(x, w).compile()
    text = compiled.as_text() or ""
    assert "purlin_collective" in text and ("all-gather" in text or "all-reduce" in text), text
    for number in range(-(-int(count) // STEPS)):
        x = compiled(x, w)
        for i in range(STEPS):
            y = right @ move
            blocks = y.reshape(n, n, -1, size)
            moved = blocks.swapaxes(0, 1).reshape(size, size)
            y = (moved + np.tile(y.reshape(n, -1, size).sum(0), (n, 1))) % PRIME
            right = (y @ move + y.T[:1] + i) % PRIME
        np.testing.assert_array_equal(x, right, f"after {(number + 1) * STEPS} steps")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
