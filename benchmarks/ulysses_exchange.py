"""Times the exchange of Ulysses attention in a chain of layers: q, k and v go in, o comes back.

python -m benchmarks.ulysses_exchange [--sequences 1024,4608] [--json FILE]

Between the two exchanges stands a cheap elementwise operation instead of attention, so a layer is
the exchange and that. "alone" is the mixing without any exchange.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import common
from purlin_jax import measure

SEQUENCE_AND_HEADS = {"BSHD": (1, 2), "BHSD": (2, 1)}
H200_GB_PER_S = 371  # one way over NVLink 4, measured with copies
COLUMNS = (
    "layout", "sequence", "impl", "regimes", "us_median", "us_p10", "us_p90", "times_lax",
    "wire_bytes", "wire_us",
)  # fmt: skip


def exchange(impl: str, split: int, concat: int, world: int) -> Callable[[Any], Any]:
    """What moves a tree of arrays; purlin takes all of its leaves in one call."""
    if impl == "alone":
        return lambda xs: jax.tree.map(lambda x: common.unexchanged(x, split, concat, world), xs)
    lib: Any = common.LIBRARIES[impl]
    return lambda xs: lib.all_to_all(xs, common.AXIS, split, concat, tiled=True)


def chain(impl: str, layout: str, layers: int, mesh: Mesh) -> Any:
    """A jitted program of dependent layers over (q, k, v) and a sign for each position and rank.

    The mixing is made of maxima, minima and signs: they are exact however XLA fuses them, so that
    bits can be compared, and nothing can be moved across an exchange, since signs differ by rank.
    """
    sequence, heads = SEQUENCE_AND_HEADS[layout]
    to_heads = exchange(impl, heads, sequence, mesh.size)
    to_sequence = exchange(impl, sequence, heads, mesh.size)

    def body(qkv: Any, sign: jax.Array) -> Any:
        q, k, v = qkv
        for _ in range(layers):
            a, b, c = to_heads((q, k, v))
            o = to_sequence(jnp.maximum(a, jnp.minimum(b, c)) * sign)
            q, k, v = o, jnp.minimum(o, -k), jnp.maximum(o, -v)
        return q, k, v

    shard = _shard(layout)
    specs = (shard, PartitionSpec(common.AXIS))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=shard, check_vma=False))


def _shard(layout: str) -> PartitionSpec:
    return PartitionSpec(*(common.AXIS if a == SEQUENCE_AND_HEADS[layout][0] else None
                           for a in range(4)))  # fmt: skip


def inputs(layout: str, shape: tuple[int, int, int], dtype: Any, mesh: Mesh) -> tuple[Any, Any]:
    """q, k and v of random numbers without zeros, and the signs."""
    length, heads, dim = shape
    full = (1, length, heads, dim) if layout == "BSHD" else (1, heads, length, dim)
    keys = jax.random.split(jax.random.key(0), 4)

    @partial(jax.jit, out_shardings=NamedSharding(mesh, _shard(layout)))
    def draw(key: jax.Array) -> jax.Array:
        x = jax.random.normal(key, full).astype(dtype)
        return jnp.where(x == 0, 1, x)  # there are two zeros, and maxima may take either

    signs = jax.random.rademacher(keys[3], (mesh.size, length), dtype)
    signs = signs[:, :, None, None] if layout == "BSHD" else signs[:, None, :, None]
    rows = NamedSharding(mesh, PartitionSpec(common.AXIS))
    return tuple(draw(key) for key in keys[:3]), jax.device_put(signs, rows)


def require_layers(text: str, impl: str, layers: int) -> None:
    """Raise EmptiedError unless the compiled program holds all exchanges, or all mixings."""
    if impl != "alone":
        calls = 2 if impl == "purlin" else 4  # a layer
        measure.require_collectives(text, "all_to_all", impl, calls * layers)
        return
    kernels = len(re.findall(r" fusion\(", text))
    if kernels < 2 * layers:
        raise measure.EmptiedError(
            f"{layers} layers of mixing alone became {kernels} kernels, and beside exchanges they "
            f"are at least {2 * layers}"
        )


def measured(layout: str, length: int, args: argparse.Namespace, mesh: Mesh) -> list[common.Row]:
    """One row for each implementation."""
    dtype = jnp.dtype(args.dtype)
    start, signs = inputs(layout, (length, args.heads, args.dim), dtype, mesh)
    compiled: dict[str, Any] = {}
    results: dict[str, Any] = {}
    regimes: dict[str, str] = {}
    for impl in [*common.libraries(mesh), "alone"]:
        compiled[impl] = chain(impl, layout, args.layers, mesh).lower(start, signs).compile()
        results[impl], regimes[impl] = common.run_noting_regimes(compiled[impl], start, signs)
    # On one device the chain without exchanges gives the same, and there is no jax.lax.
    reference = "lax" if "lax" in results else "alone"
    if not common.same_bits(results["purlin"], results[reference]):
        raise SystemExit(f"{layout}, {length}: values of purlin and {reference} differ")
    results.clear()

    def prepare(impl: str) -> measure.Sampler:
        if impl != "alone" or mesh.devices.flat[0].platform == "gpu":
            require_layers(compiled[impl].as_text(), impl, args.layers)
        return measure.pipelined(
            compiled[impl], start, signs, in_flight=args.in_flight, steps=args.layers
        )

    figures = common.timed({impl: partial(prepare, impl) for impl in compiled}, args.samples)
    sent = args.heads * args.dim * length // mesh.size * dtype.itemsize
    wire = 4 * sent * (mesh.size - 1) // mesh.size
    return [
        {
            "layout": layout,
            "sequence": length,
            "heads": args.heads,
            "dim": args.dim,
            "dtype": dtype.name,
            "layers": args.layers,
            "impl": impl,
            "regimes": regimes[impl],
            **common.place(mesh),
            **found,
            "times_lax": common.times_lax(figures.get("lax"), found),
            "wire_bytes": 0 if impl == "alone" else wire,
            "wire_us": 0.0 if impl == "alone" else round(wire / H200_GB_PER_S / 1e3, 2),
        }
        for impl, found in figures.items()
    ]


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--sequences", type=common.numbers, default=[1024, 4608, 16384])
    parser.add_argument("--layouts", type=lambda s: s.split(","), default=["BSHD", "BHSD"])
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=60, help="in one program")
    parser.add_argument("--in-flight", type=int, default=4, help="programs before a wait")
    args = parser.parse_args()
    mesh = common.mesh(args)
    rows = [
        row
        for layout in args.layouts
        for length in args.sequences
        for row in measured(layout, length, args, mesh)
    ]
    step = (
        f"a layer: q, k, v to heads, mixed, o back; {args.layers} dependent layers a program, "
        f"{args.in_flight} in flight; wire_us at {H200_GB_PER_S} GB/s"
    )
    return common.report(rows, COLUMNS, step, args)


if __name__ == "__main__":
    sys.exit(main())
