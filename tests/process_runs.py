"""Programs of several processes about the order of calls, threads, caches and resources."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import purlin_jax as purlin
from tests.process_programs import Fn, mesh_of, numbers, over, put, same


def order() -> None:
    """Independent collectives that devices reach in any order, and identical custom calls."""
    mesh = mesh_of()
    n = mesh.size
    xs = [numbers(np.float32, (n * 64, 64), seed) for seed in range(12)]

    def work(v: jax.Array) -> jax.Array:
        return purlin.all_reduce(jnp.sort(v, 0) @ jnp.ones((64, 3)), "x")

    inner = jax.jit(work)
    programs = {
        "apart": lambda *vs: [
            purlin.all_reduce(jnp.sort(v, 0) @ jnp.ones((64, 3)), "x") for v in vs
        ],
        "identical": lambda *vs: [inner(v) for v in vs],
    }

    def sums(x: np.ndarray) -> np.ndarray:
        total = np.sort(x.reshape(n, 64, 64), 1).sum((0, 2), dtype=np.float32)
        return np.tile(total[:, None], (n, 3))

    arrays = [put(x, mesh) for x in xs]
    expected = [sums(x) for x in xs]
    for name, f in programs.items():
        program = over(f, mesh)
        for turn in range(20):
            same(program(*arrays), expected, f"{name}, run {turn}")

    def scan(v: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (purlin.all_reduce(c, "x") / n + 1, None), v, None, 500)[0]

    same(over(scan, mesh)(put(np.zeros((n * 5,), np.float32), mesh)), np.full(n * 5, 500, "f4"))


def by_threads() -> None:
    """Two programs that two threads of each process dispatch at the same time."""
    mesh = mesh_of()
    n, wrong = mesh.size, []

    def repeat(k: int) -> None:
        inner = jax.jit(lambda v: purlin.all_reduce(v, "x"))
        program = over(lambda v: inner(v + k) - inner(v * k), mesh)
        x = numbers(np.float32, (n * (300 + k), 7), k)
        parts = np.stack(np.split(x, n))
        total = (parts + k).sum(0) - (parts * k).sum(0)
        expected = np.concatenate([total] * n)
        try:
            for turn in range(30):
                same(program(put(x, mesh)), expected, f"thread {k}, run {turn}")
        except jax.errors.JaxRuntimeError as error:
            print("ERROR", error, flush=True)
        except AssertionError as error:
            wrong.append(error)

    threads = [threading.Thread(target=repeat, args=(k,)) for k in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def _used() -> tuple[int, int, int]:
    """Descriptors, threads, and resident pages of this process."""
    return (
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        int(Path("/proc/self/statm").read_text().split()[1]),
    )


def many(calls: str) -> None:
    """Resources of a process over many calls."""
    mesh = mesh_of()
    n = mesh.size
    x = put(np.ones((n * 50, n), np.float32), mesh)
    program = over(
        lambda v: purlin.all_to_all(purlin.all_reduce(v, "x"), "x", 1, 1, tiled=True), mesh
    )
    for warm in (True, False):
        for _ in range(500 if warm else int(calls)):
            y = program(x)
            y.block_until_ready()
        if warm:
            before = _used()
    same(y, np.full((n * 50, n), n, np.float32))
    print("USED", json.dumps([before, _used()]), flush=True)


def two_meshes() -> None:
    """Collectives of meshes that have no device in common, at the same time."""
    devices, own = jax.devices(), jax.process_index()
    n = len(devices) // 2
    start = 0 if own < n else n
    mesh = jax.sharding.Mesh(np.array(devices[start : start + n]), ("x",))
    program = over(lambda v: purlin.all_reduce(v, "x"), mesh)
    value = 1.0 + 100 * start
    x = put(np.full((n * 3, 7), value, np.float32), mesh)
    for _ in range(200):
        same(program(x), np.full((n * 3, 7), n * value, np.float32))
    print("APART", flush=True)


def once(cached: str = "") -> None:
    """One program, which may come out of a cache."""
    hits: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
    mesh = mesh_of()
    x = numbers(np.float32, (mesh.size * 3, 5))
    total = np.stack(np.split(x, mesh.size)).sum(0)
    inner = jax.jit(lambda v: purlin.all_reduce(v, "x"))
    program = over(lambda v: (inner(v), inner(2 * v), inner(3 * v)), mesh)
    for _ in range(3 if cached else 1):
        same(
            program(put(x, mesh)), tuple(np.concatenate([k * total] * mesh.size) for k in (1, 2, 3))
        )
    print("HITS", hits.count("/jax/compilation_cache/cache_hits"), flush=True)


PROGRAMS: dict[str, Fn] = {f.__name__: f for f in (order, by_threads, two_meshes, many, once)}
