"""The double-stream transformer block of Qwen-Image, with attention left to the caller.

Shapes and structure follow the published model: an image and a text stream with weights of their
own, joined in attention alone; modulation by the time embedding, RMS norm of queries and keys,
rotary embedding with centred image positions. Weights are random.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]
Tokens = dict[str, jax.Array]  # of both streams, or what belongs to them
STREAMS = ("image", "text")
# From q, k and v of both streams, [batch, tokens, heads, dim], to what both streams attended.
Attention = Callable[[dict[str, tuple[jax.Array, jax.Array, jax.Array]]], Tokens]


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults are those of Qwen-Image."""

    heads: int = 24
    rotary: tuple[int, int, int] = (16, 56, 56)  # of a head's dim, for frame, height and width
    mlp: int = 4
    blocks: int = 4
    text: int = 512
    pixels_of_token: int = 16

    @property
    def dim(self) -> int:
        return sum(self.rotary)

    @property
    def hidden(self) -> int:
        return self.heads * self.dim


@partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: jax.Array, shape: tuple[int, ...], scale: float, dtype: Any) -> jax.Array:
    return (jax.random.normal(key, shape, dtype) * scale).astype(dtype)


def init(key: jax.Array, cfg: Config, dtype: Any) -> list[Params]:
    """Weights that keep activations near their size; gates are small, as in a trained model.

    Queries and keys are scaled up, so that a token attends to few others: an average over
    thousands would hide in rounding errors what an exchange got wrong.
    """
    keys = iter(jax.random.split(key, 2 * 16 * cfg.blocks))
    d = cfg.hidden

    def dense(rows: int, cols: int, scale: float = 1.0) -> Params:
        return {
            "w": _normal(next(keys), (rows, cols), scale / math.sqrt(rows), dtype),
            "b": _normal(next(keys), (cols,), 0.02, dtype),
        }

    def stream() -> Params:
        return {
            "modulation": dense(d, 6 * d, 0.5),
            **{name: dense(d, d) for name in ("q", "k", "v", "out")},
            "q_norm": jnp.full(cfg.dim, 2, dtype),
            "k_norm": jnp.full(cfg.dim, 2, dtype),
            "up": dense(d, cfg.mlp * d),
            "down": dense(cfg.mlp * d, d),
        }

    return [{name: stream() for name in STREAMS} for _ in range(cfg.blocks)]


def angles(cfg: Config, pixels: int) -> dict[str, np.ndarray]:
    """Rotary angles of all tokens, [tokens, dim / 2]: cut them as the tokens are cut."""
    side = pixels // cfg.pixels_of_token
    centred = np.arange(side) - (side - side // 2)
    frame = np.zeros((side, side))
    height, width = np.meshgrid(centred, centred, indexing="ij")
    after = side // 2 + np.arange(cfg.text)  # the same place on all three axes
    positions = {"image": (frame, height, width), "text": (after, after, after)}

    def along(position: np.ndarray, dim: int) -> np.ndarray:
        return position.reshape(-1, 1) / 10_000 ** (np.arange(0, dim, 2) / dim)

    return {
        name: np.concatenate(
            [along(p, dim) for p, dim in zip(places, cfg.rotary, strict=True)], 1
        ).astype(np.float32)
        for name, places in positions.items()
    }


def _affine(p: Params, x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"]


def _layer_norm(x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def _rms_norm(weight: jax.Array, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
    return y.astype(x.dtype) * weight


def _rotate(x: jax.Array, angle: jax.Array) -> jax.Array:
    """x [batch, tokens, heads, dim]: neighbouring values are a complex number, and are turned."""
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    real, imaginary = jnp.moveaxis(x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2), -1, 0)
    turned = jnp.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)
    return turned.reshape(x.shape).astype(x.dtype)


def block(
    params: Params, tokens: Tokens, time: jax.Array, angle: Tokens, cfg: Config, attend: Attention
) -> Tokens:
    """One block over the tokens of both streams, [batch, tokens, hidden], or shards of them.

    `time` [batch, hidden] is the embedding; `attend` is where tokens meet each other.
    """
    modulation = {
        name: jnp.split(_affine(params[name]["modulation"], jax.nn.silu(time))[:, None], 6, -1)
        for name in STREAMS
    }

    def qkv(name: str) -> tuple[jax.Array, jax.Array, jax.Array]:
        p, (shift, scale) = params[name], modulation[name][:2]
        x = _layer_norm(tokens[name]) * (1 + scale) + shift
        q, k, v = (
            _affine(p[n], x).reshape(*x.shape[:2], cfg.heads, cfg.dim) for n in ("q", "k", "v")
        )
        turn = partial(_rotate, angle=angle[name])
        return turn(_rms_norm(p["q_norm"], q)), turn(_rms_norm(p["k_norm"], k)), v

    attended = attend({name: qkv(name) for name in STREAMS})

    def finish(name: str) -> jax.Array:
        p, (gate1, shift, scale, gate2) = params[name], modulation[name][2:]
        x = tokens[name]
        x = x + gate1 * _affine(p["out"], attended[name].reshape(x.shape))
        y = _layer_norm(x) * (1 + scale) + shift
        return x + gate2 * _affine(p["down"], jax.nn.gelu(_affine(p["up"], y)))

    return {name: finish(name) for name in STREAMS}


def blocks(
    params: list[Params],
    tokens: Tokens,
    time: jax.Array,
    angle: Tokens,
    cfg: Config,
    attend: Attention,
) -> Tokens:
    """All blocks, one after another."""
    for p in params:
        tokens = block(p, tokens, time, angle, cfg, attend)
    return tokens
