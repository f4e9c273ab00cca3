"""Runs every op in every regime on the devices that are there, beside jax.lax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import purlin_jax as purlin
from purlin_jax import _native, domain
from purlin_jax.bench import OPS, Setup, prepare
from purlin_jax.measure import EmptiedError, held, put
from purlin_jax.policy import Policy, table

_ITEMS = (8, 1001, 2000)  # for each rank and peer: one packet, an odd size, more than one block
_STEPS = 5  # calls in a timed program: enough for a look, and compiled in a moment
_SAMPLES = 5
_ENOUGH_US = 5e3  # a call that takes longer is sampled once


def run(mesh: Mesh) -> list[dict[str, Any]]:
    """One row for each op, regime, dtype and size: passed, what was wrong if not, and how fast.

    Inputs are small integers, whose sums are exact in every order; so every comparison is bit for
    bit, and the native counter must rise by one for each rank and size.

    `us` is the time of a call inside jit, and `times_lax` how many times that jax.lax takes; None
    where there is nothing to time: XLA leaves out the collectives of jax.lax on a single GPU.
    """
    platform = "cuda" if mesh.devices.flat[0].platform == "gpu" else "cpu"
    known = table(domain.arch(platform, mesh))["regimes"]
    rows = []
    for op in OPS:
        regimes = [regime for regime in known if op in _native.regimes[regime][0]]
        for dtype in (jnp.float32, jnp.bfloat16):
            theirs = _results(op, "lax", dtype, mesh)
            wrong = {regime: _check(op, regime, dtype, mesh, theirs) for regime in regimes}
            for i, items in enumerate(_ITEMS):
                right = [regime for regime in regimes if not wrong[regime][i]]
                us = _time(op, right, dtype, items, mesh)
                for regime in regimes:
                    ours, lax = us.get(regime), us.get("")
                    rows.append(
                        {
                            "op": op,
                            "regime": regime,
                            "dtype": np.dtype(dtype).name,
                            "items": items * mesh.size,
                            "passed": not wrong[regime][i],
                            "why": wrong[regime][i],
                            "us": ours,
                            "times_lax": lax / ours if lax and ours else None,
                        }
                    )
    return rows


def _results(op: str, impl: str, dtype: Any, mesh: Mesh) -> list[np.ndarray]:
    """Of every size, by one program: compiling takes most of the time here."""
    spec = PartitionSpec("i")
    sharding = NamedSharding(mesh, spec)
    random = np.random.default_rng(0)
    inputs = [random.integers(0, 16, mesh.size * mesh.size * items) for items in _ITEMS]
    xs = [put(x.astype(dtype), sharding) for x in inputs]

    def each(xs: list[jax.Array]) -> list[jax.Array]:
        return [OPS[op][impl](x) for x in xs]

    program = jax.shard_map(each, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return [held(y) for y in jax.jit(program)(xs)]


def _check(op: str, regime: str, dtype: Any, mesh: Mesh, theirs: list[np.ndarray]) -> list[str]:
    """What is wrong with the result of each size; empty where nothing is."""
    before = purlin.native_regimes().get((op, regime), 0)
    with purlin.policy(regime), purlin.backend("purlin"):
        ours = _results(op, "purlin", dtype, mesh)
    ran = purlin.native_regimes().get((op, regime), 0) - before
    expected = len(mesh.local_devices) * len(_ITEMS)
    if ran != expected:
        return [f"{ran} native calls, expected {expected}"] * len(_ITEMS)
    pairs = zip(ours, theirs, strict=True)
    differing = [int((a.view(np.uint8) != b.view(np.uint8)).sum()) for a, b in pairs]
    return [f"{n} bytes differ" if n else "" for n in differing]


def _time(op: str, regimes: list[str], dtype: Any, items: int, mesh: Mesh) -> dict[str, float]:
    """Microseconds a call of each regime, and of jax.lax as ""; their samples alternate."""
    nbytes = items * mesh.size * np.dtype(dtype).itemsize * (mesh.size if op == "all_gather" else 1)
    samplers: dict[str, Callable[[], float]] = {}
    for regime in ["", *regimes]:
        setup = Setup(mesh, dtype, Policy(regime or "auto"), _SAMPLES, limit=_STEPS)
        try:
            samplers[regime] = prepare(op, "purlin" if regime else "lax", nbytes, setup)
        except EmptiedError:
            continue
    taken = {name: [sample()] for name, sample in samplers.items()}
    for _ in range(_SAMPLES - 1):
        for name, sample in samplers.items():
            # Processes must run the same programs, however long those take in each of them.
            if taken[name][0] < _ENOUGH_US or jax.process_count() > 1:
                taken[name].append(sample())
    return {name: float(np.median(us)) for name, us in taken.items()}
