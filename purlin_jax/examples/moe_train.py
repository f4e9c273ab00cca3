"""Trains a small mixture-of-experts classifier of handwritten digits over all devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import purlin_jax as purlin
from purlin_jax.examples import digits, dit, moe_layer

AXIS = "ep"
PATCHES = dit.Config()  # 16 tokens of 4 pixels
WIDTH, HIDDEN, EXPERTS = 32, 64, 16
BATCH = 64
BALANCE = 0.01  # weight of Routing.balance in what is minimised
RATE = 3e-3

Params = dict[str, Any]
SPECS = {"shared": jax.P(), "experts": jax.P(AXIS)}  # how Params lie on the mesh


class Trained(NamedTuple):
    """What a training leaves behind.

    Attributes:
      losses: [steps], cross entropy of each batch before its step.
      rows: [steps, experts], rows that each expert got.
      accuracy: share of held-out digits that are called by their label.
      calls: native calls of each op.
      seconds: for all but the first step, which is compiled.
    """

    losses: np.ndarray
    rows: np.ndarray
    accuracy: float
    calls: dict[str, int]
    seconds: float


def init(key: jax.Array) -> Params:
    """Fresh parameters of the classifier."""
    keys = jax.random.split(key, 4)
    router, experts = moe_layer.init(keys[0], WIDTH, HIDDEN, EXPERTS)
    shared = {
        "embed": jax.random.normal(keys[1], (PATCHES.token_size, WIDTH)) / 2,
        "position": jax.random.normal(keys[2], (PATCHES.tokens, WIDTH)),
        "head": jax.random.normal(keys[3], (WIDTH, PATCHES.classes)) / np.sqrt(WIDTH),
        "router": router,
    }
    return {"shared": shared, "experts": experts}


def classify(
    params: Params, images: jax.Array, layer: moe_layer.Layer
) -> tuple[jax.Array, moe_layer.Routing]:
    """Logits [b, 10] of images [b, 8, 8], whose patches meet only in the mean at the end."""
    shared = params["shared"]
    hidden = dit.patchify(images, PATCHES) @ shared["embed"] + shared["position"]
    mixed, routing = layer(shared["router"], params["experts"], hidden.reshape(-1, WIDTH))
    return (hidden + mixed.reshape(hidden.shape)).mean(1) @ shared["head"], routing


def loss(
    params: Params,
    images: jax.Array,
    labels: jax.Array,
    layer: moe_layer.Layer,
    mean: Callable[[jax.Array], jax.Array] = jnp.mean,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """What is minimised for a batch [b, 8, 8] with labels [b], all scalars but the last.

    Returns (value, (cross entropy, rows of each expert [experts])); `mean` averages over the batch.
    """
    logits, routing = classify(params, images, layer)
    entropy = mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
    return entropy + BALANCE * routing.balance, (entropy, routing.rows)


def gradients(mesh: Mesh, layer: moe_layer.Layer) -> Callable[..., Any]:
    """f(params, images, labels) -> (cross entropy, rows of each expert, gradients like params)."""

    def local(params: Params, images: jax.Array, labels: jax.Array) -> Any:
        def whole(params: Params) -> Any:
            return loss(params, images, labels, layer, lambda x: purlin.pmean(x.mean(), AXIS))

        own = {**params, "shared": jax.lax.pcast(params["shared"], AXIS, to="varying")}
        (_, (entropy, rows)), grads = jax.value_and_grad(whole, has_aux=True)(own)
        # An expert has heard from all ranks already; of the rest, each rank has its own part.
        return entropy, rows, {**grads, "shared": purlin.psum(grads["shared"], AXIS)}

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(SPECS, jax.P(AXIS), jax.P(AXIS)),
        out_specs=(jax.P(), jax.P(), SPECS),
    )


def train(
    mesh: Mesh,
    *,
    exchange: str,
    steps: int,
    seed: int,
    capacity: int | None = None,
    report: Callable[[int, float], None] | None = None,
) -> Trained:
    """Train with Adam on the even-numbered digits, and test on the others.

    `report` is called with the step and its cross entropy, now and then. All but the exchange and
    the capacity is settled by the seed. The capacity holds for the steps; held-out digits come in
    one batch.
    """
    images, labels = digits.images_and_labels()
    layer = partial(moe_layer.moe, axis=AXIS, exchange=exchange)
    gradient = gradients(mesh, partial(layer, capacity=capacity))
    optimizer = optax.adam(RATE)
    split = jax.NamedSharding(mesh, jax.P(AXIS))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        *measured, grads = gradient(params, images, labels)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, measured

    before = purlin.native_calls()
    params = {
        name: jax.device_put(values, jax.NamedSharding(mesh, SPECS[name]))
        for name, values in jax.jit(init)(jax.random.key(seed)).items()
    }
    count = jax.NamedSharding(mesh, jax.P())  # placed at once, or the second step compiles again
    state = jax.tree.map(
        lambda x: x if x.ndim else jax.device_put(x, count), optimizer.init(params)
    )
    pick, measured, start = np.random.default_rng(seed), [], 0.0
    for i in range(steps):
        chosen = 2 * pick.integers(0, (len(images) + 1) // 2, BATCH)
        batch = jax.device_put((images[chosen], labels[chosen]), split)
        params, state, found = jax.block_until_ready(step(params, state, *batch))
        measured.append(found)
        start = start or time.perf_counter()
        if report is not None and (i % max(1, steps // 10) == 0 or i == steps - 1):
            report(i, float(found[0]))
    seconds = time.perf_counter() - start
    losses, rows = (np.array(values) for values in zip(*measured, strict=True))

    accuracy = _accuracy(mesh, layer, params, images[1::2], labels[1::2])
    calls = {op: n - before.get(op, 0) for op, n in purlin.native_calls().items()}
    return Trained(losses, rows, accuracy, calls, seconds)


def _accuracy(
    mesh: Mesh, layer: moe_layer.Layer, params: Params, images: np.ndarray, labels: np.ndarray
) -> float:
    """Share of images that are called by their label, over as many as can be sharded."""
    best = jax.shard_map(
        lambda params, images: classify(params, images, layer)[0].argmax(-1),
        mesh=mesh,
        in_specs=(SPECS, jax.P(AXIS)),
        out_specs=jax.P(AXIS),
    )
    n = len(images) // mesh.size * mesh.size
    split = jax.NamedSharding(mesh, jax.P(AXIS))
    called = np.asarray(jax.jit(best)(params, jax.device_put(images[:n], split)))
    return float((called == labels[:n]).mean())
