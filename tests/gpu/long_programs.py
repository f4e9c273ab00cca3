"""Programs that run for long and look at memory; each exits 0 if values were right and it stayed.

python -m tests.gpu.long_programs NAME COUNT

They take the devices that JAX prefers, so JAX_PLATFORMS=cpu runs them on virtual CPU devices.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

import purlin_jax as purlin
from tests.gpu.harness import P, sharded
from tests.gpu.mixed_programs import IN_FLIGHT, STEPS, all_devices
from tests.memory import heap, resident


def _memory() -> dict[str, float]:
    """MiB on the host, that XLA has given out on devices, and that GPUs have in use."""
    found = {"heap": heap(), "resident": resident()}
    stats = [d.memory_stats() for d in jax.devices()]
    if all(stats):
        found["arrays"] = sum(s["bytes_in_use"] for s in stats if s) / 2**20
    if shutil.which("nvidia-smi") and jax.default_backend() == "gpu":
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        found["gpus"] = sum(map(float, subprocess.check_output(query, text=True).split()))
    return found


def _require_no_growth(before: dict[str, float], limits: dict[str, float]) -> None:
    growth = {what: mib - before[what] for what, mib in _memory().items()}
    print("MiB more than before:", growth, flush=True)
    assert all(mib < limits[what] for what, mib in growth.items()), (growth, limits)


def _alike(op: str, v: jax.Array) -> jax.Array:
    """v, sent by `op`, where it has a row for each rank and is alike on all of them."""
    n = jax.lax.axis_size("x")
    if op == "all_reduce":
        return purlin.all_reduce(v, "x") / n
    if op == "all_to_all":
        return purlin.all_to_all(v, "x", 0, 0, tiled=True)
    if op == "all_gather":
        return purlin.all_gather(v, "x").sum(0) / n
    return jnp.tile(purlin.reduce_scatter(v, "x", tiled=True) / n, (n, 1))


OPS = ("all_reduce", "all_to_all", "all_gather", "reduce_scatter")


def many_calls(count: str) -> None:
    """`count` collectives, half of them in loops and half in programs of four; memory stays."""
    mesh = all_devices()

    def four(v: jax.Array) -> jax.Array:
        for op in OPS:
            v = _alike(op, v)
        return v

    def loop(v: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (four(c) + 1, None), v, length=STEPS)[0]

    inside, outside = sharded(loop, mesh), sharded(four, mesh)
    x = jax.device_put(np.ones((mesh.size**2, 64), np.float32), NamedSharding(mesh, P("x")))

    def run(calls: int) -> None:
        for _ in range(max(1, calls // 2 // 4 // STEPS)):
            assert np.all(np.asarray(inside(x)) == STEPS + 1)
        y = x
        for i in range(max(1, calls // 2 // 4)):
            y = outside(y)
            if i % IN_FLIGHT == 0:
                assert np.all(np.asarray(y) == 1)
        assert np.all(np.asarray(y) == 1)

    run(int(count) // 5)
    before = _memory()
    run(int(count))
    # 100 bytes a call would be 10 MiB of 100,000.
    _require_no_growth(before, {"heap": 4, "resident": 32, "arrays": 1, "gpus": 32})


def many_shapes(count: str) -> None:
    """`count` shapes, ten in a program that is compiled, run and forgotten; memory stays."""
    mesh = all_devices()
    rng = np.random.default_rng(0)
    sizes = rng.choice(
        np.arange(32, 32 + (1 << 16) // mesh.size), int(count), replace=False
    ).reshape(-1, 10)

    def ten(values: list[jax.Array]) -> list[jax.Array]:
        return [_alike(OPS[i % 4], v) for i, v in enumerate(values)]

    before: dict[str, float] = {}
    for i, row in enumerate(sizes):
        if i == max(1, len(sizes) // 5):
            before = _memory()
        values = [np.full((mesh.size**2, n), i, np.float32) for n in row]
        for y in sharded(ten, mesh)(values):
            assert np.all(np.asarray(y) == i), i
        jax.clear_caches()  # JAX keeps every program, which is not what is measured
    # JAX and XLA keep up to 0.05 MiB of a program, whatever sends in it. Operands, kept, would be
    # 10 MiB of each program, as much as a machine's malloc may keep of memory that was freed.
    some = len(sizes) / 5
    limits = {"heap": 8 + some, "resident": 128 + some, "arrays": 1, "gpus": 64}
    _require_no_growth(before, limits)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
