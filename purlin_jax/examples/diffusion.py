"""The main job: sample a diffusion transformer by Ulysses sequence parallelism, and check it.

python -m purlin_jax.examples.diffusion sample    draw digits on all devices, compare with one
python -m purlin_jax.examples.diffusion train     make the weights that `sample` uses
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

import purlin_jax as purlin
from purlin_jax.examples import digits, dit, train

MAX_DIFFERENCE = 5e-6  # between one device and all of them, as a share of the value range
MIN_AGREEMENT = 0.95  # of the classifier with the labels asked for
CPU_DEVICES = 8


def _timed(f: Callable[[], jax.Array]) -> tuple[np.ndarray, float]:
    """The value of f() and the seconds of a second, warm call."""
    f().block_until_ready()
    start = time.perf_counter()
    value = f().block_until_ready()
    return np.asarray(value), time.perf_counter() - start


def _grid(images: np.ndarray, columns: int, zoom: int = 6) -> Image.Image:
    """A sheet of `images` in rows of `columns`, each with a margin of one pixel."""
    framed = np.pad(images, ((0, 0), (1, 1), (1, 1)), constant_values=-1.0)
    rows, size = len(framed) // columns, framed.shape[-1]
    sheet = framed.reshape(rows, columns, size, size).transpose(0, 2, 1, 3)
    grey = np.uint8(np.clip((sheet + 1) * 127.5, 0, 255).reshape(rows * size, columns * size))
    picture = Image.fromarray(grey)
    return picture.resize((picture.width * zoom, picture.height * zoom), Image.Resampling.BICUBIC)


def sample(args: argparse.Namespace) -> int:
    """Draw the digits, print what was measured, and return the exit code."""
    cfg = dit.Config()
    params = train.load(args.weights, cfg)
    devices = jax.devices()
    world = max(n for n in (1, 2, 4, 8) if n <= len(devices))  # heads and tokens must divide
    mesh = jax.sharding.Mesh(np.array(devices[:world]), ("sp",))
    label = jnp.repeat(jnp.arange(cfg.classes), args.per_class)
    noise = jax.random.normal(jax.random.key(args.seed), (len(label), cfg.tokens, cfg.token_size))
    draw = partial(dit.sample, cfg=cfg, steps=args.steps, guidance=args.guidance)
    attention = partial(purlin.ulysses_attention, axis_name="sp", backend=args.backend)

    one = jax.jit(partial(draw, attention=jax.nn.dot_product_attention))
    sequence = jax.P(None, "sp")
    many = jax.jit(
        jax.shard_map(
            partial(draw, attention=attention),
            mesh=mesh,
            in_specs=(jax.P(), sequence, jax.P("sp"), jax.P()),
            out_specs=sequence,
        )
    )
    with jax.default_matmul_precision("highest"):  # the comparison is about rounding of float32
        reference, one_s = _timed(lambda: one(params, noise, params["position"], label))
        before = sum(purlin.native_calls().values())
        drawn, many_s = _timed(lambda: many(params, noise, params["position"], label))
    calls = sum(purlin.native_calls().values()) - before

    difference = float(np.abs(drawn - reference).max() / np.ptp(reference))
    images = np.asarray(dit.unpatchify(jnp.asarray(drawn), cfg))
    judge = digits.Judge()
    agreement = judge.agreement(images, np.asarray(label))
    by_class = images.reshape(cfg.classes, args.per_class, cfg.image, cfg.image)
    _grid(by_class.swapaxes(0, 1).reshape(images.shape), cfg.classes).save(args.out)

    print(f"{len(images)} digits in {args.steps} steps, {cfg.tokens} tokens over {world} devices")
    print(f"  devices                {devices[0].device_kind} x {world}, backend {args.backend}")
    print(f"  native purlin calls    {calls}")
    print(f"  largest difference     {difference:.1e} of the value range, limit {MAX_DIFFERENCE}")
    print(f"  class agreement        {agreement:.3f}, at least {MIN_AGREEMENT} wanted", end="")
    print(f" (the classifier on real digits: {judge.accuracy:.3f})")
    print(f"  time                   {many_s:.2f} s on {world}, {one_s:.2f} s on one device")
    print(f"  picture                {args.out}")

    failures = []
    if not difference <= MAX_DIFFERENCE:
        failures.append("the devices together draw something else than one alone")
    if not agreement >= MIN_AGREEMENT:
        failures.append("the classifier does not recognise the digits")
    if args.backend == "purlin" and calls == 0:
        failures.append("no native purlin call was made")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def run_training(args: argparse.Namespace) -> int:
    """Train on one device and write the averaged weights."""
    params = train.train(dit.Config(), steps=args.steps, batch=args.batch, seed=args.seed)
    train.save(args.out, params)
    print(f"wrote {args.out}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m purlin_jax.examples.diffusion")
    commands = parser.add_subparsers(required=True)
    p = commands.add_parser("sample", help="draw digits on all devices and compare with one")
    p.set_defaults(run=sample)
    p.add_argument("--backend", choices=("purlin", "lax"), default="purlin")
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--per-class", type=int, default=8)
    p.add_argument("--guidance", type=float, default=2.0)
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--weights", type=Path, default=train.WEIGHTS)
    p.add_argument("--out", type=Path, default=Path("digits.png"))
    p = commands.add_parser("train", help="make the weights")
    p.set_defaults(run=run_training)
    p.add_argument("--steps", type=int, default=4000)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, default=train.WEIGHTS)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
