"""Helpers for Ulysses: layouts, attention on one device, and what ran natively."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purlin_jax as purlin
from tests.harness import Fn, P, to_numpy

LAYOUTS = ("BSHD", "BHSD")
EACH_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)


def spec(layout: str, batch: Any = None, sequence: Any = "x") -> Any:
    """Specs of an array whose sequence is sharded."""
    return P(batch, sequence) if layout == "BSHD" else P(batch, None, sequence)


def in_layout(layout: str, *arrays: Any) -> list[Any]:
    """BSHD arrays in the layout, and the other way round."""
    return [x if layout == "BSHD" else x.swapaxes(1, 2) for x in arrays]


def plain(q: Any, k: Any, v: Any, layout: str = "BSHD", **kwargs: Any) -> Any:
    """Attention on one device."""
    o = jax.nn.dot_product_attention(*in_layout(layout, q, k, v), **kwargs)
    return in_layout(layout, o)[0]


def plain_joint(
    q: Any, k: Any, v: Any, joint: purlin.Joint, layout: str = "BSHD", **kwargs: Any
) -> tuple[Any, Any]:
    """Attention on one device over both sequences: the image's output and the text's."""
    axis = 1 if layout == "BSHD" else 2
    front = joint.where == "front"
    parts = [((t, x) if front else (x, t)) for t, x in zip(_qkv(joint), (q, k, v), strict=True)]
    o = plain(*(jnp.concatenate(pair, axis) for pair in parts), layout, **kwargs)
    first, second = jnp.split(o, [parts[0][0].shape[axis]], axis)
    return (second, first) if front else (first, second)


def _qkv(joint: purlin.Joint) -> Sequence[Any]:
    return joint.q, joint.k, joint.v


def run_native(f: Fn, *args: Any, **expected: int | tuple[int, ...]) -> Any:
    """f(*args) as numpy; native code must have run the `expected` collectives and no others.

    Of several numbers one must be right: compilers see to different degrees that what a checkpoint
    computes again is there already.
    """
    before = purlin.native_calls()
    result = to_numpy(jax.block_until_ready(f(*args)))
    after = purlin.native_calls()
    made = {op: after[op] - before.get(op, 0) for op in after}
    made = {op: n for op, n in made.items() if n}
    right = {op: n if isinstance(n, tuple) else (n,) for op, n in expected.items()}
    assert made.keys() == right.keys() and all(n in right[op] for op, n in made.items()), (
        f"native calls {made}, expected {expected}"
    )
    return result


def assert_close(got: Any, expected: Any, **kwargs: float) -> None:
    """Both trees of arrays are equal to the rounding of float32, unless told otherwise."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, **{"rtol": 1e-4, "atol": 1e-5, **kwargs})


def value_and_grads(f: Fn, argnums: Sequence[int]) -> Fn:
    """jit of the outputs of f and the gradients of a weighted sum over all of them."""

    def loss(*args: Any) -> Any:
        out = f(*args)
        weighted = [
            (o.astype(jnp.float32) * jnp.cos(jnp.arange(o.size)).reshape(o.shape)).sum()
            for o in jax.tree.leaves(out)
        ]
        return sum(weighted), out

    return jax.jit(jax.grad(loss, tuple(argnums), has_aux=True))
