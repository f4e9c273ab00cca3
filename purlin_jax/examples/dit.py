"""A small class-conditional diffusion transformer (flow matching) whose attention is pluggable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

_FREQUENCIES = 32  # of the sinusoidal time embedding


@dataclass(frozen=True)
class Config:
    """Sizes of the model; the defaults fit the 8x8 handwritten digits (16 tokens of 4 pixels)."""

    image: int = 8
    patch: int = 2
    classes: int = 10
    hidden: int = 128
    heads: int = 8
    depth: int = 4

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2

    @property
    def token_size(self) -> int:
        return self.patch**2

    @property
    def null_class(self) -> int:
        """The label that stands for "no class" in classifier-free guidance."""
        return self.classes


def patchify(images: jax.Array, cfg: Config) -> jax.Array:
    """[b, image, image] -> [b, tokens, token_size]."""
    g, p = cfg.image // cfg.patch, cfg.patch
    return images.reshape(-1, g, p, g, p).transpose(0, 1, 3, 2, 4).reshape(-1, g * g, p * p)


def unpatchify(tokens: jax.Array, cfg: Config) -> jax.Array:
    """[b, tokens, token_size] -> [b, image, image]."""
    g, p = cfg.image // cfg.patch, cfg.patch
    return tokens.reshape(-1, g, g, p, p).transpose(0, 1, 3, 2, 4).reshape(-1, g * p, g * p)


def init(key: jax.Array, cfg: Config) -> Params:
    """Fresh parameters: every block starts as the identity (adaLN-zero)."""
    keys = iter(jax.random.split(key, 8 + 4 * cfg.depth))
    d = cfg.hidden

    def dense(rows: int, cols: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, cols)) / np.sqrt(rows)

    def table(rows: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, d)) * 0.02

    def block() -> Params:
        return {
            "modulation": jnp.zeros((d, 6 * d)),
            "qkv": dense(d, 3 * d),
            "out": dense(d, d),
            "mlp_in": dense(d, 4 * d),
            "mlp_out": dense(4 * d, d),
        }

    return {
        "embed": dense(cfg.token_size, d),
        "position": table(cfg.tokens),
        "label": table(cfg.classes + 1),
        "time_in": dense(2 * _FREQUENCIES, d),
        "time_out": dense(d, d),
        "final_modulation": jnp.zeros((d, 2 * d)),
        "final": jnp.zeros((d, cfg.token_size)),
        "blocks": [block() for _ in range(cfg.depth)],
    }


def _layer_norm(x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)


def _rms_norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def _condition(params: Params, time: jax.Array, label: jax.Array) -> jax.Array:
    angle = time[:, None] * 1000 * jnp.exp(-np.log(1e4) * jnp.arange(_FREQUENCIES) / _FREQUENCIES)
    wave = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
    embedded = jax.nn.silu(wave @ params["time_in"]) @ params["time_out"]
    return jax.nn.silu(embedded + params["label"][label])


def velocity(
    params: Params,
    tokens: jax.Array,
    position: jax.Array,
    time: jax.Array,
    label: jax.Array,
    *,
    cfg: Config,
    attention: Attention,
) -> jax.Array:
    """Velocity of the flow at `tokens` [b, s, token_size]; s may be a shard of the sequence.

    `position` [s, hidden] is the same shard of params["position"]; `attention` gets q, k and v of
    shape [b, s, heads, head_dim] and is the only place where tokens meet each other.
    """
    hidden = tokens @ params["embed"] + position
    condition = _condition(params, time, label)
    heads = (cfg.heads, cfg.hidden // cfg.heads)

    def modulation(weights: jax.Array, parts: int) -> list[jax.Array]:
        return jnp.split((condition @ weights)[:, None], parts, -1)

    for block in params["blocks"]:
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation(block["modulation"], 6)
        z = _layer_norm(hidden) * (1 + scale1) + shift1
        q, k, v = (x.reshape(*x.shape[:2], *heads) for x in jnp.split(z @ block["qkv"], 3, -1))
        mixed = attention(_rms_norm(q), _rms_norm(k), v).reshape(hidden.shape)
        hidden = hidden + gate1 * (mixed @ block["out"])
        z = _layer_norm(hidden) * (1 + scale2) + shift2
        hidden = hidden + gate2 * (jax.nn.gelu(z @ block["mlp_in"]) @ block["mlp_out"])
    shift, scale = modulation(params["final_modulation"], 2)
    return (_layer_norm(hidden) * (1 + scale) + shift) @ params["final"]


def loss(
    params: Params, tokens: jax.Array, label: jax.Array, key: jax.Array, cfg: Config
) -> jax.Array:
    """Flow-matching loss on one batch: logit-normal time, a tenth of the labels dropped."""
    k_noise, k_time, k_drop = jax.random.split(key, 3)
    noise = jax.random.normal(k_noise, tokens.shape)
    time = jax.nn.sigmoid(jax.random.normal(k_time, label.shape))
    label = jnp.where(jax.random.uniform(k_drop, label.shape) < 0.1, cfg.null_class, label)
    t = time[:, None, None]
    predicted = velocity(
        params,
        (1 - t) * noise + t * tokens,
        params["position"],
        time,
        label,
        cfg=cfg,
        attention=jax.nn.dot_product_attention,
    )
    return ((predicted - (tokens - noise)) ** 2).mean()


def sample(
    params: Params,
    noise: jax.Array,
    position: jax.Array,
    label: jax.Array,
    *,
    cfg: Config,
    attention: Attention,
    steps: int,
    guidance: float,
) -> jax.Array:
    """Integrate the flow from `noise` [b, s, token_size] to images in `steps` Euler steps."""
    labels = jnp.concatenate([label, jnp.full_like(label, cfg.null_class)])

    def step(i: jax.Array, tokens: jax.Array) -> jax.Array:
        time = jnp.full(labels.shape, i / steps)
        both = velocity(
            params,
            jnp.concatenate([tokens, tokens]),
            position,
            time,
            labels,
            cfg=cfg,
            attention=attention,
        )
        conditional, free = jnp.split(both, 2)
        return tokens + (free + guidance * (conditional - free)) / steps

    return jax.lax.fori_loop(0, steps, step, noise)
