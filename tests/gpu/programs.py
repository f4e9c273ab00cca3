"""Programs that provoke deadlocks and mixed data; each exits 0 if every value was right.

python -m tests.gpu.programs NAME [ARGUMENT...]
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import purlin_jax as purlin
from tests.gpu.harness import P, gpus, sharded


def _late(x: jax.Array, seconds: float) -> jax.Array:
    """x, handed on after rank 1's host thread has slept: rank 0 then waits for it on the GPU."""

    def sleep(rank: Any, value: Any) -> Any:
        if int(rank) == 1:
            time.sleep(seconds)
        return np.asarray(value)

    return jax.pure_callback(
        sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.axis_index("x"), x
    )


def chain(steps: int) -> Any:
    """x <- all_reduce(x) / N + 1, `steps` times unrolled."""
    mesh = gpus()

    def body(x: jax.Array) -> jax.Array:
        for _ in range(steps):
            x = purlin.all_reduce(x, "x") / mesh.size + 1
        return x

    return sharded(body, mesh)


def captured(steps: str) -> None:
    """One program of many dependent calls, for a look at what XLA dumps."""
    x = jnp.zeros(gpus().size * 256)
    assert np.all(np.asarray(chain(int(steps))(x)) == int(steps))


def scan(steps: str) -> None:
    """x <- all_reduce(x) / N + 1 in a lax.scan."""
    mesh = gpus()

    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return purlin.all_reduce(x, "x") / mesh.size + 1, None

    f = sharded(lambda x: jax.lax.scan(step, x, None, length=int(steps))[0], mesh)
    for _ in range(2):
        assert np.all(np.asarray(f(jnp.zeros(mesh.size * 256))) == int(steps))


def fresh_executables(count: str) -> None:
    """Many programs in one process, each run as soon as it is compiled, none awaited in between."""
    mesh = gpus()
    x = jnp.ones((mesh.size, 512))
    results = []
    for i in range(int(count)):
        results.append(sharded(lambda v, i=i: purlin.all_reduce(v + i, "x"), mesh)(x))
        if i % 50 == 49:
            for k, y in enumerate(results, start=i - 49):
                assert np.all(np.asarray(y) == mesh.size * (1 + k)), k
            results.clear()


def first_use() -> None:
    """Rank 0 waits on the GPU while rank 1's host thread meets every library for the first time."""
    mesh = gpus()

    def body(x: jax.Array, image: jax.Array) -> jax.Array:
        y = purlin.all_reduce(_late(x, 2.0), "x")
        y = y @ y.T  # cuBLAS
        y = purlin.all_reduce(_late(y, 0.5), "x")
        kernel = jnp.ones((4, image.shape[1], 3, 3))
        c = jax.lax.conv(image + y[0, 0], kernel, (1, 1), "SAME")  # cuDNN
        s = jnp.linalg.svd(y + jnp.eye(len(y)), compute_uv=False)  # cuSolver
        f = jnp.abs(jnp.fft.fft(y)).sum()  # cuFFT
        return purlin.all_reduce(c.sum()[None] * 0 + s[:1] * 0 + f * 0 + 1, "x")

    x = jnp.ones((mesh.size * 64, 64))
    y = sharded(body, mesh, in_specs=(P("x"), P("x")))(x, jnp.ones((mesh.size * 2, 8, 32, 32)))

    # Meanwhile this thread compiles, loads modules, and allocates 8 GB on the late rank's GPU.
    late = mesh.devices.flat[-1]
    blocks = [jax.device_put(np.ones(1 << 28, np.float32), late) for _ in range(8)]
    compiled = jax.jit(lambda v: jnp.sort(jnp.cumsum(v * 3)).sum())
    other = compiled(jax.device_put(np.ones(1000, np.float32), late))
    assert np.all(np.asarray(y) == mesh.size), y
    assert float(other) == 3 * 1000 * 1001 / 2
    assert all(float(b[-1]) == 1 for b in blocks)


def alternating_buffers(count: str) -> None:
    """Addresses change on one device only, so that it records again and the other replays."""
    mesh = gpus()
    f = chain(50)
    first = mesh.devices.flat[0]
    rng = np.random.default_rng(0)
    held: list[jax.Array] = []
    for i in range(int(count)):
        held.append(jax.device_put(np.zeros(int(rng.integers(1, 1 << 16)), np.float32), first))
        if len(held) > 3:
            held.pop(int(rng.integers(0, len(held))))
        y = f(jnp.full(mesh.size * 4096, float(i)))
        assert np.all(np.asarray(y) == i + 50), i


def threads(count: str) -> None:
    """Two Python threads dispatch one executable with different data, and two executables."""
    mesh = gpus()
    same = sharded(lambda v: purlin.all_reduce(v, "x") * 2, mesh)
    other = sharded(lambda v: purlin.all_to_all(v, "x", 0, 0, tiled=True) + 1, mesh)
    shape = (mesh.size * mesh.size, 128)
    base = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % 1000
    for f in (same, other):
        jax.block_until_ready(f(jnp.asarray(base)))
    failures: list[str] = []

    def reduced(x: np.ndarray) -> np.ndarray:
        return np.tile(x.reshape(mesh.size, -1, 128).sum(0) * 2, (mesh.size, 1))

    def exchanged(x: np.ndarray) -> np.ndarray:
        blocks = x.reshape(mesh.size, mesh.size, -1, 128).swapaxes(0, 1)
        return blocks.reshape(shape) + 1

    def work(number: int) -> None:
        for i in range(int(count)):
            x = (base + number * 100_000 + i).astype(np.float32)
            mixed = i % 2 and number
            y = np.asarray((other if mixed else same)(jnp.asarray(x)))
            if not np.array_equal(y, exchanged(x) if mixed else reduced(x)):
                failures.append(f"thread {number}, call {i}")
                return

    workers = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures


def late_rank(seconds: str, budget: str) -> None:
    """One rank arrives after the budget: an error, with the report printed before it."""
    mesh = gpus()
    purlin.set_timeout(float(budget), slow=1.0)
    f = sharded(lambda x: purlin.all_reduce(_late(x, float(seconds)), "x"), mesh)
    try:
        jax.block_until_ready(f(jnp.ones(mesh.size * 256)))
    except Exception as error:
        print("REPORT", purlin.last_report(), flush=True)
        print("ERROR", type(error).__name__, flush=True)
        raise SystemExit(3) from None
    print("no error", flush=True)


def bad_counts(kind: str) -> None:
    """Counts that would write out of bounds: an error, and a report that names ranks and values."""
    mesh = gpus()
    right = np.full((mesh.size, mesh.size), 2, np.int32)
    wrong = right.copy()
    wrong[-1, 0] = {"negative": -3, "outside": 100, "capacity": 7}[kind]

    def f(x: jax.Array, sizes: jax.Array) -> jax.Array:
        return purlin.all_to_all_v(x, sizes[0], "x", capacity=2 * mesh.size + 1)[0]

    program = sharded(f, mesh)
    x = jnp.ones((mesh.size * (8 + 2 * mesh.size), 3))
    jax.block_until_ready(program(x, right))
    try:
        jax.block_until_ready(program(x, wrong))
    except jax.errors.JaxRuntimeError as error:
        print("REPORT", purlin.last_report(), flush=True)
        print("ERROR", type(error).__name__, flush=True)
        raise SystemExit(3) from None
    print("no error", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
