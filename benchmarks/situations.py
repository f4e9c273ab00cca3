"""Programs that a chain of dependent collectives says nothing about, each over local [rows, 512].

They are what benchmarks.beside runs in a process for each set of XLA's flags.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import common
from purlin_jax import bench, measure

WIDTH = 512
OPS = ("all_reduce", "all_to_all")
SITUATIONS = ("call", "scan", "overlap")
Collective = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True)
class Sizes:
    """How much is done beside the collective."""

    scan_steps: int
    overlap_steps: int
    overlap_width: int  # of the square matrices
    samples: int


def call(collective: Collective, sizes: Sizes) -> Any:
    """One collective, waited for: what a program pays that holds nothing else."""
    del sizes
    return lambda x, w: collective(x) * w["scale"]


def scan(collective: Collective, sizes: Sizes) -> Any:
    """Layers of an MLP with split weights in a lax.scan: two products, a collective, a norm.

    XLA records a graph of a loop's body where it holds at least five kernels.
    """

    def run(x: jax.Array, w: Any) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            y = collective(jax.nn.gelu(x @ w["up"]) @ w["down"]) * w["scale"]
            norm = jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
            return x + y * norm * 0.1, None

        return jax.lax.scan(layer, x, None, length=sizes.scan_steps)[0]

    return run


def overlap(collective: Collective, sizes: Sizes) -> Any:
    """Each step holds a collective and products that do not need it, and the next needs both."""

    def run(x: jax.Array, w: Any) -> jax.Array:
        for _ in range(sizes.overlap_steps):
            a = w["square"] * (1 + 1e-3 * x[0, 0])  # so that no step knows the products before
            for _ in range(2):
                a = a @ w["square"]
            # The barrier keeps XLA from computing the one value that is used.
            used = jax.lax.optimization_barrier(a)[0, 0]
            x = collective(x) * w["scale"] + 1e-3 * used
        return x

    return run


def _inputs(nbytes: int, op: str, sizes: Sizes, mesh: Mesh) -> tuple[jax.Array, Any]:
    rows = max(mesh.size, nbytes // WIDTH // 2 // mesh.size * mesh.size)
    rng, width = np.random.default_rng(0), sizes.overlap_width

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape, np.float32) * scale).astype(jnp.bfloat16)

    w = {
        "up": normal(WIDTH, WIDTH, scale=WIDTH**-0.5),
        "down": normal(WIDTH, WIDTH, scale=WIDTH**-0.5),
        "square": normal(width, width, scale=width**-0.5),
        "scale": np.asarray(1 / mesh.size if op == "all_reduce" else 1, jnp.bfloat16),
    }
    x = normal(mesh.size * rows, WIDTH)
    sharding = NamedSharding(mesh, PartitionSpec(common.AXIS))
    return jax.device_put(x, sharding), jax.device_put(w, NamedSharding(mesh, PartitionSpec()))


def _prepare(
    situation: str, op: str, impl: str, given: Any, sizes: Sizes, mesh: Mesh
) -> measure.Sampler:
    build = {"call": call, "scan": scan, "overlap": overlap}[situation]
    collective = (lambda x: x) if impl == "alone" else bench.OPS[op][impl]
    shard = PartitionSpec(common.AXIS)
    program = jax.shard_map(
        build(collective, sizes),
        mesh=mesh,
        in_specs=(shard, PartitionSpec()),
        out_specs=shard,
        check_vma=False,
    )
    jitted = jax.jit(program)
    compiled = jitted.lower(*given).compile()
    held = 0 if impl == "alone" else sizes.overlap_steps if situation == "overlap" else 1
    exact = situation != "scan"
    measure.require_collectives(compiled.as_text(), op, impl, held, exact=exact)
    # What is compiled ahead of time is called through Python, which is slower than jit's way.
    run = jitted if situation == "call" else compiled
    steps = {"call": 1, "scan": sizes.scan_steps, "overlap": sizes.overlap_steps}[situation]
    return measure.pipelined(run, *given, in_flight=1, steps=steps)


def _check(op: str, given: Any, mesh: Mesh) -> None:
    """End the program where purlin and jax.lax give different values."""
    spec = PartitionSpec(common.AXIS)
    results = [
        jax.jit(
            jax.shard_map(
                bench.OPS[op][impl], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
            )
        )(given[0])
        for impl in common.libraries(mesh)
    ]
    # Sums of more than two values may be rounded in another order.
    if op == "all_to_all" or mesh.size <= 2:
        agree = common.same_bits(results[0], results[-1])
    else:
        lax, ours = (r.astype(jnp.float32) for r in results)
        agree = bool(jnp.allclose(lax, ours, rtol=0.05, atol=0.1))
    if not agree:
        raise SystemExit(f"{op}: values of purlin and jax.lax differ")


def measured(
    situations: Sequence[str], op: str, nbytes: int, sizes: Sizes, mesh: Mesh
) -> list[common.Row]:
    """One row for each situation and implementation.

    "alone" is the rest of the step without the collective.
    """
    given = _inputs(nbytes, op, sizes, mesh)
    _check(op, given, mesh)
    rows = []
    for situation in situations:
        impls = [*common.libraries(mesh), *(["alone"] if situation != "call" else [])]
        figures = common.timed(
            {impl: partial(_prepare, situation, op, impl, given, sizes, mesh) for impl in impls},
            sizes.samples,
        )
        rows += [
            {
                "situation": situation,
                "op": op,
                "bytes": given[0].nbytes // mesh.size,
                "impl": impl,
                **common.place(mesh),
                **found,
                "times_lax": common.times_lax(figures.get("lax"), found),
            }
            for impl, found in figures.items()
        ]
    return rows
