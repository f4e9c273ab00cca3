"""Times blocks of Qwen-Image over sharded tokens: with purlin, with jax.lax, without exchange.

python -m benchmarks.mmdit_block [--images 512,1024] [--text replicated] [--json FILE]

"alone" computes the same and exchanges nothing, so its values are wrong; it is what no exchange
can beat. The last column is the share of (lax - alone) that purlin gives back.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import purlin_jax as purlin
from benchmarks import common, mmdit
from purlin_jax import measure

COLUMNS = (
    "pixels", "text", "impl", "regimes", "ms_median", "ms_p10", "ms_p90", "times_lax",
    "error_image", "error_text", "recovered",
)  # fmt: skip
SMALL = mmdit.Config(heads=8, rotary=(4, 6, 6), text=16)
# Relative RMS error against one device. Both compute the same products in other tiles.
LIMITS = {"bfloat16": 0.05, "float16": 0.02, "float32": 1e-3}


def attention(impl: str, placement: str, implementation: str, world: int) -> mmdit.Attention:
    """Joint attention of text and image on one device, or over the axis in one of three ways."""
    on_device = partial(jax.nn.dot_product_attention, implementation=implementation)

    def attend(qkv: Any) -> mmdit.Tokens:
        image, text = qkv["image"], _joint(qkv["text"], placement)
        if impl in common.LIBRARIES:
            o, o_text = purlin.ulysses_attention(
                *image, joint=text, axis_name=common.AXIS, attn_fn=on_device, backend=impl
            )
        else:
            o, o_text = _by_itself(image, text, on_device, world if impl == "alone" else 1)
        return {"image": o, "text": o_text}

    return attend


def _joint(qkv: Any, placement: str) -> purlin.Joint:
    q, k, v = qkv
    return purlin.Joint(q, k, v, placement=placement)


def _by_itself(image: Any, text: purlin.Joint, on_device: Any, world: int) -> tuple[Any, Any]:
    """Joint attention over what this device holds, in the shapes that it has among `world`."""
    replicated = text.placement == "replicated"

    def to_heads(x: jax.Array) -> jax.Array:
        return x if world == 1 else common.unexchanged(x, 2, 1, world)

    def to_sequence(x: jax.Array) -> jax.Array:
        return x if world == 1 else common.unexchanged(x, 1, 2, world)

    def shared(x: jax.Array) -> jax.Array:
        return x[:, :, : x.shape[2] // world] if replicated else to_heads(x)

    texts = [shared(x) for x in (text.q, text.k, text.v)]
    joined = [text.join(t, to_heads(x), 1) for t, x in zip(texts, image, strict=True)]
    o_text, o = text.part(on_device(*joined), texts[0].shape[1], 1)
    o_text = jnp.tile(o_text, (1, 1, world, 1)) if replicated else to_sequence(o_text)
    return to_sequence(o), o_text


def program(impl: str, cfg: mmdit.Config, args: argparse.Namespace, mesh: Mesh) -> Any:
    """The jitted blocks: (tokens, params, time, angles) -> tokens."""
    attend = attention(impl, args.text, args.attention, mesh.size)

    def run(tokens: Any, params: Any, time: Any, angle: Any) -> Any:
        return mmdit.blocks(params, tokens, time, angle, cfg, attend)

    if impl == "one device":
        return jax.jit(run)
    replicated = PartitionSpec()
    shards = _specs(args.text, PartitionSpec(None, common.AXIS))
    rows = _specs(args.text, PartitionSpec(common.AXIS))
    specs = (shards, replicated, replicated, rows)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=shards, check_vma=False))


def _specs(placement: str, shard: PartitionSpec) -> dict[str, PartitionSpec]:
    return {"image": shard, "text": shard if placement == "sharded" else PartitionSpec()}


def inputs(cfg: mmdit.Config, pixels: int, dtype: Any) -> tuple[Any, Any, Any]:
    """Tokens of both streams, the time embedding, and the rotary angles."""
    angle = mmdit.angles(cfg, pixels)
    keys = jax.random.split(jax.random.key(1), 3)
    tokens = {
        name: jax.random.normal(key, (1, len(angle[name]), cfg.hidden)).astype(dtype)
        for name, key in zip(mmdit.STREAMS, keys, strict=False)
    }
    return tokens, jax.random.normal(keys[2], (1, cfg.hidden)).astype(dtype), angle


def error(got: jax.Array, expected: jax.Array) -> float:
    """Relative RMS."""
    a, b = np.asarray(got, np.float32), np.asarray(expected, np.float32)
    return float(np.sqrt(((a - b) ** 2).mean() / (b**2).mean()))


def require_exchanges(text: str, impl: str, placement: str, blocks: int) -> None:
    """Raise EmptiedError unless the compiled program exchanges what it should."""
    six_arrays_in = 2 if placement == "sharded" else 1  # four arrays go in a call of purlin
    calls = {
        "purlin": six_arrays_in + (1 if placement == "sharded" else 2),
        "lax": 8 if placement == "sharded" else 4,
    }.get(impl, 0)
    measure.require_collectives(text, "all_to_all", impl, calls * blocks)


def measured(
    pixels: int, cfg: mmdit.Config, params: Any, args: argparse.Namespace, mesh: Mesh
) -> list[common.Row]:
    """One row for each implementation."""
    given = inputs(cfg, pixels, args.dtype)
    one = jax.device_put((given[0], params, *given[1:]), mesh.devices.flat[0])
    everywhere = NamedSharding(mesh, PartitionSpec())

    def spread(tree: Any, shard: PartitionSpec) -> Any:
        specs = _specs(args.text, shard)
        return {
            name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in tree.items()
        }

    many = (
        spread(given[0], PartitionSpec(None, common.AXIS)),
        params,
        jax.device_put(given[1], everywhere),
        spread(given[2], PartitionSpec(common.AXIS)),
    )
    compiled: dict[str, Any] = {}
    results: dict[str, Any] = {}
    regimes: dict[str, str] = {}
    for impl in [*common.libraries(mesh), "alone", "one device"]:
        a = one if impl == "one device" else many
        compiled[impl] = program(impl, cfg, args, mesh).lower(*a).compile()
        found, regimes[impl] = common.run_noting_regimes(compiled[impl], *a)
        results[impl] = jax.tree.map(np.asarray, found)
    errors = {
        impl: {name: error(r[name], results["one device"][name]) for name in mmdit.STREAMS}
        for impl, r in results.items()
    }
    for impl in common.libraries(mesh):
        if not max(errors[impl].values()) < LIMITS[args.dtype]:
            raise SystemExit(f"{pixels} pixels, {impl}: error against one device {errors[impl]}")

    def prepare(impl: str) -> measure.Sampler:
        if impl != "one device":
            require_exchanges(compiled[impl].as_text(), impl, args.text, cfg.blocks)
        a = one if impl == "one device" else many
        return measure.pipelined(compiled[impl], *a, in_flight=args.in_flight, steps=cfg.blocks)

    figures = common.timed({impl: partial(prepare, impl) for impl in compiled}, args.samples)
    rows = []
    for impl, found in figures.items():
        row = {
            "pixels": pixels,
            "tokens": {name: x.shape[1] for name, x in given[0].items()},
            "hidden": cfg.hidden,
            "dtype": args.dtype,
            "attention": args.attention,
            "text": args.text,
            "impl": impl,
            "regimes": regimes[impl],
            **common.place(mesh),
            **found,
            "times_lax": common.times_lax(figures.get("lax"), found),
            "recovered": recovered(figures) if impl == "purlin" else None,
        }
        row |= _milliseconds(found)
        if impl != "one device":
            row |= {f"error_{name}": e for name, e in errors[impl].items()}
        rows.append(row)
    return rows


def _milliseconds(found: common.Row) -> common.Row:
    return {
        name.replace("us_", "ms_"): round(value / 1e3, 4)
        for name, value in found.items()
        if name.startswith("us_")
    }


def recovered(figures: dict[str, common.Row]) -> float | None:
    """(lax - purlin) / (lax - alone), where there is something to recover."""
    us = {impl: row["us_median"] for impl, row in figures.items() if "us_median" in row}
    if not {"lax", "purlin", "alone"} <= us.keys() or us["lax"] <= us["alone"]:
        return None
    return round((us["lax"] - us["purlin"]) / (us["lax"] - us["alone"]), 3)


def main() -> int:
    parser = common.parser(__doc__, samples=11)
    parser.add_argument("--images", type=common.numbers, help="sides in pixels")
    parser.add_argument("--text", choices=("sharded", "replicated"), default="sharded")
    parser.add_argument("--attention", choices=("cudnn", "xla"), help="default: by platform")
    parser.add_argument("--dtype", choices=LIMITS, help="default: bfloat16, with --small float32")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a laptop")
    parser.add_argument("--blocks", type=int, default=4, help="in one program")
    parser.add_argument("--in-flight", type=int, default=4, help="programs before a wait")
    args = parser.parse_args()
    mesh = common.mesh(args)
    cfg = dataclasses.replace(SMALL if args.small else mmdit.Config(), blocks=args.blocks)
    gpu = mesh.devices.flat[0].platform == "gpu"
    args.images = args.images or ([128] if args.small else [512, 1024])
    args.dtype = args.dtype or ("float32" if args.small else "bfloat16")
    # cuDNN attends in 16 bits alone.
    args.attention = args.attention or ("cudnn" if gpu and args.dtype != "float32" else "xla")
    params = mmdit.init(jax.random.key(0), cfg, args.dtype)
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    rows = [row for pixels in args.images for row in measured(pixels, cfg, params, args, mesh)]
    step = f"a block of {cfg.blocks} in a program, {args.in_flight} programs in flight"
    return common.report(rows, COLUMNS, step, args)


if __name__ == "__main__":
    sys.exit(main())
