"""A mixture of experts sharded over a mesh axis, and the same function on one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import purlin_jax as purlin

Params = dict[str, jax.Array]
EXCHANGES = ("purlin", "padded")


class Routing(NamedTuple):
    """What the router did with the tokens of all ranks.

    Attributes:
      rows: [experts] int32, how many tokens each expert got.
      balance: scalar to be minimised, about 1 where experts get as many tokens each and up to the
        number of experts where one gets them all.
    """

    rows: jax.Array
    balance: jax.Array


Sent = tuple[jax.Array, jax.Array, Callable[[jax.Array], jax.Array]]
Layer = Callable[[Params, Params, jax.Array], tuple[jax.Array, Routing]]


def init(key: jax.Array, width: int, hidden: int, experts: int) -> tuple[Params, Params]:
    """Fresh parameters of the router and of all experts.

    The router has weights [width, experts] and bias [experts]; experts have w_in [experts, width,
    hidden] and w_out [experts, hidden, width].
    """
    keys = jax.random.split(key, 3)
    router = {
        "weights": jax.random.normal(keys[0], (width, experts)) / np.sqrt(width),
        "bias": jnp.zeros(experts),
    }
    return router, {
        "w_in": jax.random.normal(keys[1], (experts, width, hidden)) / np.sqrt(width),
        "w_out": jax.random.normal(keys[2], (experts, hidden, width)) / np.sqrt(hidden),
    }


def moe(
    router: Params,
    experts: Params,
    tokens: jax.Array,
    *,
    axis: str,
    k: int = 2,
    exchange: str = "purlin",
    capacity: int | None = None,
) -> tuple[jax.Array, Routing]:
    """Take each token through its k best experts, wherever they are; for use in jax.shard_map.

    Args:
      router: as `init` makes it, the same on all ranks.
      experts: those of this rank, w_in [local, width, hidden] and w_out [local, hidden, width];
        rank r has the experts from r * local on.
      tokens: [tokens, width], those of this rank.
      axis: mesh axis over which tokens and experts are sharded.
      k: experts for each token.
      exchange: "purlin" sends the rows that there are. "padded" makes every pair of ranks exchange
        as many rows as one rank has in all, by jax.lax.all_to_all.
      capacity: rows that a rank can receive; by default all there are, ranks * tokens * k. More
        than that at run time are a jax.errors.JaxRuntimeError. Padded blocks are not affected.

    Returns:
      (out, routing): [tokens, width], and the Routing of all ranks.
    """
    local = experts["w_in"].shape[0]
    wanted, gates, probs = _route(router, tokens, k)
    wanted = wanted.reshape(-1)  # a token stands here once for each of its experts
    order = jnp.argsort(wanted, stable=True)
    per_expert = jnp.bincount(wanted, length=probs.shape[1]).astype(jnp.int32)
    sizes = per_expert.reshape(-1, local).sum(1, dtype=jnp.int32)
    rows, number = tokens[order // k], wanted[order] % local
    send: dict[str, Callable[..., Sent]] = {
        "purlin": partial(_send_rows, capacity=capacity),
        "padded": _send_blocks,
    }
    there, number, send_back = send[exchange](rows, number, sizes, local, axis)
    back = send_back(_run_experts(experts, there, number))[jnp.argsort(order)]
    out = jnp.einsum("tkw,tk->tw", back.reshape(-1, k, tokens.shape[1]), gates)
    return out, _routing(*purlin.psum((per_expert, probs.sum(0)), axis))


def sharded(mesh: Mesh, *, axis: str, exchange: str, capacity: int | None = None) -> Layer:
    """`moe` over a mesh: f(router, experts, tokens) of all experts and tokens."""
    return jax.shard_map(
        partial(moe, axis=axis, exchange=exchange, capacity=capacity),
        mesh=mesh,
        in_specs=(jax.P(), jax.P(axis), jax.P(axis)),
        out_specs=(jax.P(axis), jax.P()),
    )


def dense_reference(
    router: Params, experts: Params, tokens: jax.Array, *, k: int = 2
) -> tuple[jax.Array, Routing]:
    """The same function of all experts and all tokens [tokens, width], with nothing exchanged.

    Every expert computes every token; the gate of those that were not asked is 0.
    """
    wanted, gates, probs = _route(router, tokens, k)
    chosen = jax.nn.one_hot(wanted, probs.shape[1])  # [tokens, k, experts]
    hidden = jax.nn.gelu(jnp.einsum("tw,ewh->eth", tokens, experts["w_in"]))
    done = jnp.einsum("eth,ehw->etw", hidden, experts["w_out"])
    out = jnp.einsum("etw,tke,tk->tw", done, chosen, gates)
    return out, _routing(chosen.sum((0, 1)).astype(jnp.int32), probs.sum(0))


def _route(router: Params, tokens: jax.Array, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Experts [tokens, k] of each token, gates [tokens, k] and probabilities [tokens, experts]."""
    probs = jax.nn.softmax(tokens @ router["weights"] + router["bias"])
    best, wanted = jax.lax.top_k(probs, k)
    return wanted, best / best.sum(-1, keepdims=True), probs


def _routing(rows: jax.Array, probs: jax.Array) -> Routing:
    """From what each expert got, and its probability summed over all tokens."""
    return Routing(rows, len(rows) * (rows / rows.sum() * probs / probs.sum()).sum())


def _run_experts(experts: Params, rows: jax.Array, number: jax.Array) -> jax.Array:
    """Each of `rows` [rows, width] through the expert of its number; 0 where there is none."""
    order = jnp.argsort(number, stable=True)
    sizes = jnp.bincount(number, length=len(experts["w_in"])).astype(jnp.int32)
    hidden = jax.nn.gelu(jax.lax.ragged_dot(rows[order], experts["w_in"], sizes))
    return jax.lax.ragged_dot(hidden, experts["w_out"], sizes)[jnp.argsort(order)]


def _send_rows(
    rows: jax.Array,
    number: jax.Array,
    sizes: jax.Array,
    local: int,
    axis: str,
    capacity: int | None,
) -> Sent:
    """Send rows, sizes[p] of them to rank p, and with each the number of its expert there.

    Returns rows [capacity, width], numbers [capacity] (`local` where there is no row), and the
    function that takes rows of that shape back to where they came from.
    """
    room = len(rows) * len(sizes) if capacity is None else capacity
    (there, number), received = purlin.all_to_all_v((rows, number), sizes, axis, capacity=room)
    number = jnp.where(jnp.arange(room) < received.sum(), number, local)

    def back(done: jax.Array) -> jax.Array:
        return purlin.all_to_all_v(done, received, axis, capacity=len(rows))[0]

    return there, number, back


def _send_blocks(
    rows: jax.Array, number: jax.Array, sizes: jax.Array, local: int, axis: str
) -> Sent:
    """The same in blocks of one size, which has room for all rows of a rank."""
    block, ends = len(rows), jnp.cumsum(sizes)
    at = jnp.arange(block)
    rank = jnp.searchsorted(ends, at, side="right")
    place = rank * block + at - (ends - sizes)[rank]
    room = len(sizes) * block

    def swap(blocks: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(blocks, axis, 0, 0, tiled=True)

    there = swap(jnp.zeros((room, rows.shape[1]), rows.dtype).at[place].set(rows))
    number = swap(jnp.full(room, local, number.dtype).at[place].set(number))
    return there, number, lambda done: swap(done)[place]
