"""Times the collectives whose counts are data, even and uneven, against what jax.lax offers.

python -m benchmarks.varlen [--sizes 64K,1M] [--kinds uniform,zipf_1] [--json FILE]

On GPUs jax.lax has ragged_all_to_all. Otherwise programs pad: each pair of ranks exchanges blocks
of a fixed number of rows, here 4 times the mean count (25 % of a block is filled) or the largest
count, whichever is more; packing and unpacking such blocks is not timed. "bytes" are what a rank
sends on average, its own block included; of all_gather_v the result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

import purlin_jax as purlin
from benchmarks import common
from purlin_jax import bench, measure

OPS = ("all_gather_v", "reduce_scatter_v", "all_to_all_v")
KINDS = ("uniform", "zipf_1/8", "zipf_1", "one_hot")
COLUMNS = (
    "op", "kind", "bytes", "regimes", "impl", "largest", "us_median", "us_p10", "us_p90",
    "gbs", "times_lax",
)  # fmt: skip
STEP = "x <- op(x), dependent steps; the result is cut or padded to the shape of x"
FILL = 4  # rows of a padded block for each row that is sent, on average


def counts(kind: str, total: int, world: int) -> np.ndarray:
    """Rows for each rank, `total` in all: the same from every sender, so receivers are uneven."""
    if kind == "one_hot":
        return np.eye(world, dtype=np.int32)[0] * total
    exponent = {"uniform": 0.0, "zipf_1/8": 0.125, "zipf_1": 1.0}[kind]
    weights = 1 / np.arange(1, world + 1) ** exponent
    rows = np.floor(total * weights / weights.sum()).astype(np.int32)
    rows[0] += total - rows.sum()
    return rows


@dataclass(frozen=True)
class Case:
    """What is exchanged: rows of `width` bytes."""

    op: str
    kind: str
    nbytes: int
    width: int
    mesh: Mesh

    @property
    def sizes(self) -> np.ndarray:
        return counts(self.kind, max(self.mesh.size, self.nbytes // self.width), self.mesh.size)

    @property
    def block(self) -> int:
        """Rows of a padded block."""
        sizes = self.sizes
        return max(-(-FILL * int(sizes.sum()) // len(sizes)), int(sizes.max()))


Step = Callable[[jax.Array, jax.Array], jax.Array]


def ours(case: Case) -> tuple[Step, int]:
    """A step by purlin, and the rows of its operand."""
    sizes, world, total = case.sizes, case.mesh.size, int(case.sizes.sum())
    if case.op == "all_gather_v":
        rows = case.block

        def gather(x: jax.Array, s: jax.Array) -> jax.Array:
            own = s[jax.lax.axis_index(common.AXIS)]
            y, _ = purlin.all_gather_v(x, own, common.AXIS, capacity=total, fill=None)
            return y[:rows] if total >= rows else jnp.pad(y, ((0, rows - total), (0, 0)))

        return gather, rows
    if case.op == "reduce_scatter_v":
        most = int(sizes.max())

        def reduce(x: jax.Array, s: jax.Array) -> jax.Array:
            y, _ = purlin.reduce_scatter_v(x, s, common.AXIS, capacity=most, fill=None)
            return jnp.pad(y, ((0, total - most), (0, 0)))

        return reduce, total
    rows = max(total, int(sizes.max()) * world)
    return (
        lambda x, s: purlin.all_to_all_v(x, s, common.AXIS, capacity=rows, fill=None)[0],
        rows,
    )


def padded(case: Case) -> tuple[Step, int]:
    """The same by jax.lax, in blocks of a fixed size."""
    world, block, axis = case.mesh.size, case.block, common.AXIS
    if case.op == "all_gather_v":
        return lambda x, _: jax.lax.all_gather(x, axis, tiled=True)[:block], block
    if case.op == "reduce_scatter_v":
        return (
            lambda x, _: jnp.pad(
                jax.lax.psum_scatter(x, axis, tiled=True), ((0, (world - 1) * block), (0, 0))
            ),
            world * block,
        )
    return lambda x, _: jax.lax.all_to_all(x, axis, 0, 0, tiled=True), world * block


def ragged(case: Case) -> tuple[Step, int]:
    """all_to_all_v by jax.lax.ragged_all_to_all; sizes are the same on all ranks."""
    _, rows = ours(case)
    world = case.mesh.size

    def step(x: jax.Array, s: jax.Array) -> jax.Array:
        rank = jax.lax.axis_index(common.AXIS)
        return jax.lax.ragged_all_to_all(
            x,
            x,
            jnp.cumsum(s) - s,
            s,
            rank * s,
            jnp.broadcast_to(s[rank], (world,)),
            axis_name=common.AXIS,
        )

    return step, rows


def prepare(case: Case, impl: str, steps: int) -> measure.Sampler:
    """Compile, warm up, and return a function that takes one sample: microseconds a step."""
    on_gpu = case.mesh.devices.flat[0].platform == "gpu"
    build = ours if impl == "purlin" else padded
    name = {"all_gather_v": "all_gather", "reduce_scatter_v": "reduce_scatter"}.get(
        case.op, "all_to_all"
    )
    if impl == "lax" and case.op == "all_to_all_v" and on_gpu:
        build, name = ragged, "ragged_all_to_all"
    step, rows = build(case)

    def body(x: jax.Array, s: jax.Array) -> jax.Array:
        for _ in range(steps):
            x = step(x, s)
        return x

    sharding = NamedSharding(case.mesh, jax.P(common.AXIS))
    dtype = jnp.float32
    start = jax.device_put(
        np.zeros((rows * case.mesh.size, case.width // dtype(0).itemsize), dtype), sharding
    )
    sizes = jax.device_put(case.sizes, NamedSharding(case.mesh, jax.P()))
    mapped = jax.shard_map(
        body,
        mesh=case.mesh,
        in_specs=(jax.P(common.AXIS), jax.P()),
        out_specs=jax.P(common.AXIS),
        check_vma=False,
    )
    program = jax.jit(mapped, donate_argnums=0 if on_gpu else ()).lower(start, sizes).compile()
    measure.require_collectives(program.as_text(), name, impl, steps)
    return measure.pipelined(program, start, sizes, in_flight=2, steps=steps)


def measured(case: Case, samples: int) -> list[common.Row]:
    steps = 50 if case.nbytes <= 1 << 20 else 10
    programs: dict[str, Any] = {
        impl: lambda impl=impl: prepare(case, impl, steps) for impl in common.libraries(case.mesh)
    }
    before = purlin.native_regimes()
    found = common.timed(programs, samples)
    after = purlin.native_regimes()
    regimes = ",".join(sorted(r for (op, r), n in after.items() if n > before.get((op, r), 0)))
    rows = []
    for impl, row in found.items():
        row = {
            "op": case.op,
            "kind": case.kind,
            "bytes": case.nbytes,
            "row_bytes": case.width,
            **common.place(case.mesh),
            "regimes": regimes if impl == "purlin" else "",
            "impl": impl,
            "largest": int(case.sizes.max()),
            **row,
        }
        if "us_median" in row:
            row["gbs"] = round(case.nbytes / row["us_median"] / 1e3, 3)
        row["times_lax"] = common.times_lax(found.get("lax"), row)
        rows.append(row)
    return rows


def main() -> int:
    parser = common.parser(__doc__)
    sizes = "1K,16K,256K,4M"
    parser.add_argument("--sizes", type=lambda t: [bench.parse_size(s) for s in t.split(",")],
                        default=[bench.parse_size(s) for s in sizes.split(",")])  # fmt: skip
    parser.add_argument("--ops", type=lambda t: t.split(","), default=list(OPS))
    parser.add_argument("--kinds", type=lambda t: t.split(","), default=list(KINDS))
    parser.add_argument("--row-bytes", type=int, default=64)
    args = parser.parse_args()
    mesh = common.mesh(args)
    rows = []
    for op in args.ops:
        for kind in args.kinds:
            for nbytes in args.sizes:
                rows += measured(Case(op, kind, nbytes, args.row_bytes, mesh), args.samples)
    status = common.report(rows, COLUMNS, STEP, args)
    ratios = [r["times_lax"] for r in rows if r["impl"] == "purlin" and r["times_lax"]]
    if ratios:
        mean = measure.geometric_mean(ratios)
        print(f"geometric mean of {len(ratios)} cells: {mean:.2f}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
