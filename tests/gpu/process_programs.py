"""Programs of several processes with a GPU each, or a share of one."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import purlin_jax as purlin
from purlin_jax import domain
from tests.process_faults import attempt, reduced, sync
from tests.process_programs import Fn, mesh_of, numbers, over, put, same


def chained(steps: str) -> None:
    """x <- all_reduce(x) / N + 1 in a lax.scan: XLA replays what it recorded."""
    mesh = mesh_of()
    for size, regime in ((256, "packet"), (1 << 16, "zero_staging"), (1 << 16, "staged")):

        def body(x: jax.Array, regime: str = regime) -> jax.Array:
            def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
                with purlin.policy(regime):
                    return purlin.all_reduce(x, "x") / mesh.size + 1, None

            return jax.lax.scan(step, x, None, length=int(steps))[0]

        x = np.zeros(mesh.size * size, np.float32)
        same(over(body, mesh)(put(x, mesh)), x + int(steps), regime)

    def beside(v: jax.Array) -> Any:
        with purlin.policy("zero_staging"):
            return purlin.all_gather({"some": v, "none": v[:0]}, "x", tiled=True)

    got = over(beside, mesh)(put(x, mesh))
    same(got["some"], np.concatenate([x] * mesh.size))
    assert got["none"].shape == (0,)


def growing() -> None:
    """XLA's pool grows: new allocations are lent while other processes wait for the call."""
    mesh, own = mesh_of(), jax.process_index()
    f = over(lambda v: purlin.all_gather(v[:, :2], "x", tiled=True), mesh)
    with purlin.policy("zero_staging"):
        kept = []
        for i in range(6):
            if own == i % jax.process_count():
                time.sleep(0.5)  # the others wait on their GPUs
            x = numbers(np.float32, (mesh.size * 8, 32 << (10 + i)), i)
            kept.append(put(x, mesh))
            y = f(kept[-1])
            same(y, np.concatenate([x[:, :2]] * mesh.size), f"{x.nbytes} bytes")
    print("LENDS", domain.cuda.lends(), flush=True)


def slow() -> None:
    """Rank 1 comes late to two calls, within the budget."""
    mesh, own = mesh_of(), jax.process_index()
    program = reduced(mesh)
    x = put(numbers(np.float32, (mesh.size * 3, 5)), mesh)
    for _ in range(3):
        program(x).block_until_ready()
        time.sleep(2.5 * own)


def without_lending() -> None:
    """Where arrays cannot be mapped by others, regimes with staging take over."""
    mesh = mesh_of()
    assert not mesh_lends(mesh)
    x = numbers(np.float32, (mesh.size * mesh.size, 100_000))
    same(
        reduced(mesh)(put(x, mesh)),
        np.concatenate([np.stack(np.split(x, mesh.size)).sum(0)] * mesh.size),
    )
    used = {regime for _, regime in purlin.native_regimes()}
    assert used and not {r for r in used if r.startswith("zero")}, used
    try:
        with purlin.policy("zero_staging"):
            reduced(mesh)(put(x, mesh))
    except ValueError as error:
        assert "needs arrays that other processes can map" in str(error), error
    else:
        raise AssertionError("a forced zero_staging was accepted")


def mesh_lends(mesh: Any) -> bool:
    domain.ensure_started("cuda", joined=True)
    return domain.lends("cuda", mesh)


def _end() -> None:
    """A context that has failed is of no more use, and JAX would wait for its programs."""
    sys.stdout.flush()
    os._exit(0)


def fault(what: str) -> None:
    """What others hear of a process that is late, lost, or runs something else."""
    mesh, own = mesh_of(), jax.process_index()
    x = put(numbers(np.float32, (mesh.size * 64, 4)), mesh)
    program = reduced(mesh)
    program(x).block_until_ready()
    other = put(numbers(np.float32, (mesh.size * 65, 4)), mesh)
    another = program.lower(other).compile()
    sync("begin")
    if what == "shapes":
        attempt("fault", *((another, other) if own else (program, x)))
    elif what == "counts":
        sizes = put(np.full(mesh.size, 1 + 98 * own, np.int32), mesh)

        def bad(v: jax.Array, size: jax.Array) -> jax.Array:
            return purlin.all_to_all_v(
                v, size[0] * jnp.ones(mesh.size, jnp.int32), "x", capacity=64
            )[0]

        attempt("fault", over(bad, mesh), x, sizes)
    elif own != 1:
        print("READY", flush=True)
        attempt("fault", program, x)
        attempt("later", program, x)
    elif what == "exits":
        time.sleep(1)
    else:
        print("READY", flush=True)
        time.sleep(60)
    _end()


PROGRAMS: dict[str, Fn] = {f.__name__: f for f in (chained, growing, slow, without_lending, fault)}
