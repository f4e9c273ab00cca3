"""Times collectives inside jax.jit against jax.lax, in chains of dependent calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import purlin_jax as purlin
from purlin_jax import domain
from purlin_jax.measure import Sampler, interleaved, pipelined, put, require_collectives, spread
from purlin_jax.policy import Choice, Policy, Traffic, choose

STEP = "x <- op(x) * w, 200 dependent steps a program, 10 in flight (20 and 2 for large)"


def _same_shape(op: str, lib: Any) -> Callable[[jax.Array], jax.Array]:
    """The collective on a local array [n], with what brings the result back to [n] for a chain."""
    if op == "all_to_all":
        return lambda x: lib.all_to_all(x, "i", 0, 0, tiled=True)
    if op == "all_gather":
        return lambda x: lib.all_gather(x, "i", tiled=True)[: x.shape[0]]
    if op == "reduce_scatter":
        return lambda x: jnp.tile(lib.psum_scatter(x, "i", tiled=True), jax.lax.axis_size("i"))
    return lambda x: lib.psum(x, "i")


_LIBRARIES = {"purlin": purlin, "lax": jax.lax}
OPS = {
    op: {impl: _same_shape(op, lib) for impl, lib in _LIBRARIES.items()}
    for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
}
_REDUCES = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Setup:
    """What all rows of one table share."""

    mesh: Mesh
    dtype: Any
    policy: Policy
    samples: int
    limit: int = 200  # the most dependent calls in one program; fewer compile sooner

    @property
    def platform(self) -> str:
        return "cuda" if self.mesh.devices.flat[0].platform == "gpu" else "cpu"

    def steps(self, nbytes: int) -> int:
        """Dependent calls in one program; fewer where a call takes milliseconds."""
        large = 1 << 20 if self.platform == "cpu" else 64 << 20
        return min(self.limit, 200 if nbytes <= large else 20)

    def in_flight(self, nbytes: int) -> int:
        """Programs that are dispatched before the first is waited for."""
        return 10 if self.steps(nbytes) == 200 else 2


def parse_size(text: str) -> int:
    """Bytes of "16", "4K", "1M" or "1G"."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip().upper())
    if match is None:
        raise ValueError(f"a size is a number with K, M or G after it, not {text!r}")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def chain(op: Callable[..., Any], steps: int, mesh: Mesh, donate: bool = False) -> Any:
    """A jitted program of `steps` dependent calls: x <- op(x) * w, over local arrays [n].

    The multiplication by a value of each device's own keeps the compiler from folding calls; it is
    part of the step for every implementation.
    """

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(steps):
            x = op(x) * w
        return x

    spec = PartitionSpec("i")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    return jax.jit(mapped, donate_argnums=0 if donate else ())


def prepare(op: str, impl: str, nbytes: int, setup: Setup) -> Sampler:
    """Compile, warm up, and return a function that takes one sample: microseconds a step."""
    mesh, steps, in_flight = setup.mesh, setup.steps(nbytes), setup.in_flight(nbytes)
    world = mesh.size
    local = nbytes // world if op == "all_gather" else nbytes
    items = max(world, local // np.dtype(setup.dtype).itemsize // world * world)
    sharding = NamedSharding(mesh, PartitionSpec("i"))
    values = np.random.default_rng(0).random(world * items).astype(setup.dtype)
    start = put(values, sharding)
    scale = 1 / world if op in _REDUCES else 1.0
    w = put(np.full(world, scale, setup.dtype), sharding)
    with purlin.policy(setup.policy.regime, blocks=setup.policy.blocks):
        # As the state of a training step is. Without it arrays change places, and XLA records its
        # command buffers again in the middle of the measurement.
        donate = setup.platform == "cuda"
        compiled = chain(OPS[op][impl], steps, mesh, donate).lower(start, w).compile()
    require_collectives(compiled.as_text(), op, impl, steps)
    return pipelined(compiled, start, w, in_flight=in_flight, steps=steps)


def run(
    ops: Sequence[str], sizes: Sequence[int], against: Sequence[str], setup: Setup
) -> list[dict[str, Any]]:
    """One row for each op, size and implementation; samples of implementations alternate."""
    rows = []
    for op in ops:
        for nbytes in sizes:
            impls = ["purlin", *against]
            samplers = [prepare(op, impl, nbytes, setup) for impl in impls]
            taken = interleaved(samplers, setup.samples)
            for impl, us in zip(impls, taken, strict=True):
                rows.append(_row(op, impl, nbytes, us, setup))
    return rows


def chosen(policy: Policy, op: str, arch: str, world: int, nbytes: int) -> Choice:
    """What purlin runs a row's call with."""
    pair = nbytes if op == "all_reduce" else nbytes // world
    capacity = domain.capacity("cuda" if arch.startswith("sm_") else "cpu", world)
    return choose(policy, op, arch, world, Traffic(pair, capacity=capacity))


def _row(op: str, impl: str, nbytes: int, us: Sequence[float], setup: Setup) -> dict[str, Any]:
    device = setup.mesh.devices.flat[0]
    world = setup.mesh.size
    choice = chosen(setup.policy, op, domain.arch(setup.platform, setup.mesh), world, nbytes)
    ours = impl == "purlin"
    found = spread(us)
    return {
        "op": op,
        "platform": setup.platform,
        "device_kind": device.device_kind,
        "devices": world,
        "bytes": nbytes,
        "dtype": np.dtype(setup.dtype).name,
        "impl": impl,
        "policy": "default" if setup.policy == Policy() else setup.policy.regime,
        "timing": "jit",
        "regime": choice.regime if ours else "",
        "atom": choice.atom if ours else "",
        **found,
        "algbw_gbs": round(nbytes / found["us_median"] / 1e3, 3),
    }


LEGEND = (
    "bytes: all of an all_gather's output, else the input of a rank; GB/s: bytes / us; "
    "times 2.00 lax: half as long as jax.lax"
)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as text, each purlin row with its ratio to jax.lax in jit, and to NCCL alone."""
    base = {
        (r["timing"], r["op"], r["bytes"]): r for r in rows if r["impl"] in ("lax", "nccl")
    }  # jax.lax is timed in jit and NCCL alone, so they never meet
    lines = [
        f"{'op':15}{'bytes':>12}{'timing':>8}{'impl':>8}  {'how':28}"
        f"{'us':>11}{'p10':>11}{'p90':>11}{'GB/s':>9}{'times':>11}"
    ]
    for r in rows:
        other = base.get((r["timing"], r["op"], r["bytes"]))
        ratio = ""
        if other is not None and other is not r:
            ratio = f"{other['us_median'] / r['us_median']:.2f} {other['impl']}"
        how = r["regime"] or r.get("variant", "")
        lines.append(
            f"{r['op']:15}{r['bytes']:12}{r['timing']:>8}{r['impl']:>8}  {how:28}"
            f"{r['us_median']:11.2f}{r['us_p10']:11.2f}{r['us_p90']:11.2f}{r['algbw_gbs']:9.2f}"
            f"{ratio:>11}".rstrip()
        )
    return "\n".join(lines)
