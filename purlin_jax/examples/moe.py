"""A mixture of experts whose tokens travel by counts that the router makes as the program runs.

python -m purlin_jax.examples.moe train      train it on digits over all devices
python -m purlin_jax.examples.moe compare    train by both exchanges, compare them and one device
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from purlin_jax.examples import moe_layer, moe_train

MAX_DIFFERENCE = 1e-5  # of layers from the dense one, as a share of the largest value
MAX_LOSS_DIFFERENCE = 1e-4  # of trainings by both exchanges; rounding grows with every step
MIN_ACCURACY = 0.8  # on held-out digits
CPU_DEVICES = 8


def _mesh() -> Mesh:
    devices = jax.devices()
    world = max(n for n in (1, 2, 4, 8, 16) if n <= len(devices))  # experts and batch must divide
    return Mesh(np.array(devices[:world]), (moe_train.AXIS,))


def _train(mesh: Mesh, exchange: str, args: argparse.Namespace) -> moe_train.Trained:
    """Train and print what was measured."""
    print(f"{args.steps} steps over {mesh.size} devices, exchange {exchange}")
    trained = moe_train.train(
        mesh,
        exchange=exchange,
        steps=args.steps,
        seed=args.seed,
        capacity=args.capacity,
        report=lambda i, loss: print(f"  step {i:4}  loss {loss:.4f}", flush=True),
    )
    calls = trained.calls
    on_rank = trained.rows.reshape(args.steps, mesh.size, -1).sum(-1)
    print(f"  native purlin calls    {sum(calls.values())}, ", end="")
    print(f"of them {calls.get('all_to_all_v', 0)} of all_to_all_v")
    for whose, rows in (("a device", on_rank), ("an expert", trained.rows)):
        largest, mean = rows.max(), rows.mean()
        print(f"  {f'rows of {whose}':22} {largest} at most, {mean:.0f} on average", end="")
        print(f" ({largest / mean:.1f} times)")
    print(f"  held-out accuracy      {trained.accuracy:.3f}, at least {MIN_ACCURACY} wanted")
    print(f"  time                   {trained.seconds:.1f} s without the first step")
    return trained


def _faults(exchange: str, trained: moe_train.Trained) -> list[str]:
    failures = []
    last = trained.losses[-max(1, len(trained.losses) // 10) :].mean()
    if not (last < trained.losses[0] / 2 and trained.accuracy >= MIN_ACCURACY):
        failures.append(
            f"exchange {exchange}: loss {trained.losses[0]:.2f} to {last:.2f}, accuracy "
            f"{trained.accuracy:.3f}; half the loss and {MIN_ACCURACY} were wanted, so train longer"
        )
    if exchange == "purlin" and not trained.calls.get("all_to_all_v"):
        failures.append("no native call of all_to_all_v was made")
    return failures


def _end(failures: list[str]) -> int:
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def train(args: argparse.Namespace) -> int:
    """Train by one exchange and return the exit code."""
    return _end(_faults(args.exchange, _train(_mesh(), args.exchange, args)))


def with_gradients(layer: moe_layer.Layer) -> Callable[..., Any]:
    """f(router, experts, tokens) -> (out, rows, gradients of the three).

    The cotangent of out [tokens, width] is always the same, and that of the balance is 1.
    """

    def f(*operands: Any) -> Any:
        out, routing = layer(*operands)
        cotangent = np.cos(np.arange(out.size, dtype=np.float32)).reshape(out.shape)
        return (out * cotangent).sum() + routing.balance, (out, routing.rows)

    def g(*operands: Any) -> Any:
        grads, measured = jax.grad(f, (0, 1, 2), has_aux=True)(*operands)
        return *measured, grads

    return jax.jit(g)


def difference(got: Any, expected: Any) -> float:
    """The largest difference of two trees, for each leaf as a share of its largest value."""

    def share(a: jax.Array, b: jax.Array) -> float:
        return float(jnp.abs(a - b).max() / jnp.abs(b).max())

    return max(jax.tree.leaves(jax.tree.map(share, got, expected)))


def compare_layers(mesh: Mesh) -> list[str]:
    """Compare the layer by each exchange with the dense one, and return what is wrong."""
    router, experts = moe_layer.init(jax.random.key(0), 16, 32, moe_train.EXPERTS)
    tokens = jax.random.normal(jax.random.key(1), (32 * mesh.size, 16))
    dense, failures = with_gradients(moe_layer.dense_reference)(router, experts, tokens), []
    for exchange in moe_layer.EXCHANGES:
        layer = moe_layer.sharded(mesh, axis=moe_train.AXIS, exchange=exchange)
        apart = difference(with_gradients(layer)(router, experts, tokens), dense)
        print(f"layer and gradients, {exchange} and dense: {apart:.1e} apart, ", end="")
        print(f"limit {MAX_DIFFERENCE}", flush=True)
        if not apart <= MAX_DIFFERENCE:
            failures.append(f"the layer with exchange {exchange} is not the dense one")
    return failures


def compare_trainings(mesh: Mesh, args: argparse.Namespace) -> list[str]:
    """Train by each exchange, from the same weights, and return what is wrong."""
    trained = {exchange: _train(mesh, exchange, args) for exchange in moe_layer.EXCHANGES}
    failures = [f for exchange, result in trained.items() for f in _faults(exchange, result)]
    apart = float(np.abs(trained["purlin"].losses - trained["padded"].losses).max())
    print(f"losses of both exchanges: {apart:.1e} apart, limit {MAX_LOSS_DIFFERENCE}")
    if not apart <= MAX_LOSS_DIFFERENCE:
        failures.append("the losses of the exchanges differ")
    return failures


def compare(args: argparse.Namespace) -> int:
    """Compare layers, then trainings, and return the exit code."""
    mesh = _mesh()
    with jax.default_matmul_precision("highest"):  # the comparison is about rounding of float32
        return _end([*compare_layers(mesh), *compare_trainings(mesh, args)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m purlin_jax.examples.moe")
    commands = parser.add_subparsers(required=True)
    p = commands.add_parser("train", help="train on digits over all devices")
    p.set_defaults(run=train)
    p.add_argument("--exchange", choices=moe_layer.EXCHANGES, default="purlin")
    p.add_argument("--steps", type=int, default=300)
    q = commands.add_parser("compare", help="train by both exchanges, compare them and one device")
    q.set_defaults(run=compare)
    q.add_argument("--steps", type=int, default=60)
    for command in (p, q):
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--capacity", type=int, help="rows that a device can get in a step")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
