"""What all programs that measure share: devices, samples, headers, and no figures for nothing."""

from __future__ import annotations

import datetime
import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import purlin_jax as purlin
from purlin_jax import domain

Sampler = Callable[[], float]
BANDS = {"1 KiB to 1 MiB": (1 << 10, 1 << 20), "4 MiB to 1 GiB": (4 << 20, 1 << 30)}


class EmptiedError(RuntimeError):
    """The compiled program does not hold what it should time."""


def devices(platform: str | None = None, count: int | None = None) -> list[jax.Device]:
    """The devices asked for, by default all that JAX prefers; on the CPU 8 virtual ones."""
    if not jax.distributed.is_initialized():  # whoever did that has said how many there are
        jax.config.update("jax_num_cpu_devices", count or 8)
    found = jax.devices(platform)
    wanted = count or len(found)
    if wanted > len(found):
        raise SystemExit(f"{wanted} devices were asked for, and {len(found)} are there")
    return found[:wanted]


def put(values: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """An array on the devices of all processes, which have the same `values`."""
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def held(x: jax.Array) -> np.ndarray:
    """What the devices of this process hold of `x`, along its first axis."""
    shards = sorted(x.addressable_shards, key=lambda s: s.index[0].start or 0)
    return np.concatenate([np.asarray(s.data) for s in shards])


def require_collectives(
    text: str | None, op: str, impl: str, steps: int, *, exact: bool = True
) -> None:
    """Raise EmptiedError unless the compiled HLO `text` holds `steps` calls of `op`.

    Not `exact`: or more of them, where XLA may unroll the loop that holds them.
    """
    pattern = (
        rf'custom_call_target="{domain.TARGET}"'
        if impl == "purlin"
        else rf" {op.replace('_', '-')}(-start)?\("
    )
    found = len(re.findall(pattern, text or ""))
    if found < steps or (exact and found > steps):
        raise EmptiedError(
            f"the program of {steps} {op} by {impl} holds {found} of them after compilation, so "
            "there is nothing to time"
        )


def pipelined(
    program: Callable[..., Any], start: Any, *constant: Any, in_flight: int, steps: int
) -> Sampler:
    """Warm up, and return a function that takes one sample: microseconds a step.

    `program` maps `start` to its like, and has `steps` steps; `in_flight` of them are dispatched
    before the first is waited for. Each takes the result of the one before, so it may donate it.
    """
    x = start
    for _ in range(3):
        x = jax.block_until_ready(program(x, *constant))

    def sample() -> float:
        nonlocal x
        began = time.perf_counter()
        for _ in range(in_flight):
            x = program(x, *constant)
        jax.block_until_ready(x)
        return (time.perf_counter() - began) / in_flight / steps * 1e6

    return sample


def interleaved(samplers: Sequence[Sampler], samples: int) -> list[list[float]]:
    """Samples of each; they alternate, so that what disturbs one disturbs its neighbours too."""
    taken: list[list[float]] = [[] for _ in samplers]
    for _ in range(samples):
        for mine, sampler in zip(taken, samplers, strict=True):
            mine.append(sampler())
    return taken


def spread(us: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile of samples, as rows hold them."""
    at = {"us_median": 50, "us_p10": 10, "us_p90": 90}
    return {name: round(float(np.percentile(us, q)), 3) for name, q in at.items()}


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def against_nccl(rows: Sequence[dict[str, Any]]) -> str:
    """How many times faster than NCCL the kernels are, small and large: the mean and the worst."""
    kernels = [r for r in rows if r["timing"] == "kernel"]
    nccl = {(r["op"], r["bytes"]): r["us_median"] for r in kernels if r["impl"] == "nccl"}
    ratios = {
        (r["op"], r["bytes"]): nccl[r["op"], r["bytes"]] / r["us_median"]
        for r in kernels
        if r["impl"] == "purlin" and (r["op"], r["bytes"]) in nccl
    }
    lines = []
    for name, (least, most) in BANDS.items():
        mine = {cell: ratio for cell, ratio in ratios.items() if least <= cell[1] <= most}
        if mine:
            (op, nbytes), worst = min(mine.items(), key=lambda item: item[1])
            lines.append(
                f"kernels, {name}: {geometric_mean(list(mine.values())):.3f} times NCCL "
                f"(geometric mean of {len(mine)}), worst {worst:.3f}: {op} of {nbytes} bytes"
            )
    return "\n".join(lines)


def header(samples: int, step: str) -> dict[str, Any]:
    """What is needed to read the rows later; `step` says what was timed."""
    commit, dirty = "unknown", None
    root = Path(__file__).parent.parent
    try:
        git = ["git", "-C", str(root)]
        commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
        dirty = bool(subprocess.check_output([*git, "status", "--porcelain"], text=True))
    except (OSError, subprocess.CalledProcessError):
        commit = os.environ.get("PURLIN_COMMIT", commit)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "dirty": dirty,
        "purlin_jax": purlin.__version__,
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "samples": samples,
        "step": step,
    }
