"""Runs every op in every regime on the devices that are there and compares with jax.lax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import purlin_jax as purlin
from purlin_jax import _native, domain
from purlin_jax.bench import OPS
from purlin_jax.policy import table

_ITEMS = (8, 1001, 2000)  # for each rank and peer: one packet, an odd size, more than one block


def run(mesh: Mesh) -> list[dict[str, Any]]:
    """One row for each op, regime, dtype and size: passed, and what was wrong if not.

    Inputs are small integers, whose sums are exact in every order; so every comparison is bit for
    bit, and the native counter must rise by one for each rank.
    """
    platform = "cuda" if mesh.devices.flat[0].platform == "gpu" else "cpu"
    rows = []
    for regime in table(domain.arch(platform, mesh))["regimes"]:
        for op in [op for op in OPS if op in _native.regimes[regime][0]]:
            for dtype in (jnp.float32, jnp.bfloat16):
                for items in _ITEMS:
                    wrong = _check(op, regime, dtype, items, mesh)
                    rows.append(
                        {
                            "op": op,
                            "regime": regime,
                            "dtype": np.dtype(dtype).name,
                            "items": items * mesh.size,
                            "passed": not wrong,
                            "why": wrong,
                        }
                    )
    return rows


def _check(op: str, regime: str, dtype: Any, items: int, mesh: Mesh) -> str:
    spec = PartitionSpec("i")
    values = np.random.default_rng(0).integers(0, 16, mesh.size * mesh.size * items)
    x = jax.device_put(jnp.asarray(values, dtype), NamedSharding(mesh, spec))
    results = []
    for impl, function in OPS[op].items():
        with purlin.policy(regime), purlin.backend("purlin"):
            program = jax.jit(
                jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
            )
            before = purlin.native_regimes().get((op, regime), 0)
            results.append(np.asarray(program(x)))
            if impl == "purlin":
                ran = purlin.native_regimes().get((op, regime), 0) - before
                if ran != mesh.size:
                    return f"{ran} native calls, expected {mesh.size}"
    ours, theirs = results
    differing = int((ours.view(np.uint8) != theirs.view(np.uint8)).sum())
    return f"{differing} bytes differ" if differing else ""
