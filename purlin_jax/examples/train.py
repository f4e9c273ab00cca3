"""Trains the digits model of the diffusion example and writes its averaged (EMA) weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from purlin_jax.examples import digits, dit

WEIGHTS = Path(__file__).with_name("digits_dit.npz")
_EMA = 0.998


def save(path: Path, params: dit.Params) -> None:
    """Write `params` as float16 arrays named by their place in the tree."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    arrays = {jax.tree_util.keystr(k): np.asarray(v, np.float16) for k, v in leaves}
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def load(path: Path, cfg: dit.Config) -> dit.Params:
    """Read parameters that `save` wrote, as float32."""
    shapes = jax.eval_shape(lambda: dit.init(jax.random.key(0), cfg))
    with np.load(path) as stored:
        return jax.tree_util.tree_map_with_path(
            lambda key, _: jnp.asarray(stored[jax.tree_util.keystr(key)], jnp.float32), shapes
        )


def train(cfg: dit.Config, *, steps: int, batch: int, seed: int) -> dit.Params:
    """EMA weights after `steps` steps of AdamW on random batches of the digits."""
    images, labels = digits.images_and_labels()
    tokens = np.asarray(dit.patchify(jnp.asarray(images), cfg))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.cosine_decay_schedule(1e-3, steps, 0.05), b2=0.99),
    )

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params: Any, ema: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        value, grads = jax.value_and_grad(dit.loss)(params, x, y, key, cfg)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        ema = jax.tree.map(lambda a, b: _EMA * a + (1 - _EMA) * b, ema, params)
        return params, ema, state, value

    root = jax.random.key(seed)
    params = dit.init(root, cfg)
    ema = jax.tree.map(jnp.copy, params)
    state = optimizer.init(params)
    pick = np.random.default_rng(seed)
    bar = tqdm(range(steps), unit="step")
    for i in bar:
        chosen = pick.integers(0, len(tokens), batch)
        key = jax.random.fold_in(root, i + 1)
        params, ema, state, value = step(params, ema, state, tokens[chosen], labels[chosen], key)
        if i % 50 == 0:
            bar.set_postfix(loss=f"{float(value):.4f}")
    return ema
