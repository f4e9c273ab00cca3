"""Ulysses attention over a sharded sequence equals plain attention over the whole of it."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purlin_jax as purlin
from tests.harness import (
    Fn,
    P,
    assert_same_bits,
    custom_calls,
    mesh,
    native_collectives,
    random_array,
    reordered_2x4,
    run_counted,
    sharded,
)

LAYOUTS = ("BSHD", "BHSD")
EACH_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
# [batch, sequence, heads, dim]
Q = random_array("float32", (2, 16, 8, 4), 0)
K, V = (random_array("float32", (2, 16, 4, 4), seed) for seed in (1, 2))


def _spec(layout: str) -> Any:
    return P(None, "x") if layout == "BSHD" else P(None, None, "x")


def _in_layout(layout: str, *arrays: np.ndarray) -> list[np.ndarray]:
    return [x if layout == "BSHD" else x.swapaxes(1, 2) for x in arrays]


def _plain(q: Any, k: Any, v: Any, layout: str = "BSHD", **kwargs: Any) -> Any:
    """Attention on one device."""
    o = jax.nn.dot_product_attention(*_in_layout(layout, q, k, v), **kwargs)
    return _in_layout(layout, o)[0]


def _ulysses(world: int, layout: str = "BSHD", **kwargs: Any) -> Fn:
    f = partial(purlin.ulysses_attention, axis_name="x", layout=layout, **kwargs)
    return sharded(f, mesh(world), in_specs=(_spec(layout),) * 3, out_specs=_spec(layout))


@EACH_LAYOUT
def test_gather_is_the_inverse_of_scatter(layout: str) -> None:
    def there(*arrays: jax.Array) -> Any:
        return purlin.scatter_heads(*arrays, axis_name="x", layout=layout)

    def back(*arrays: jax.Array) -> Any:
        return purlin.gather_heads(*arrays, axis_name="x", layout=layout)

    arrays = _in_layout(layout, Q, K, V.astype(jnp.bfloat16))
    spec = _spec(layout)
    round_trip = sharded(
        lambda *a: back(*there(*a)), mesh(4), in_specs=(spec,) * 3, out_specs=(spec,) * 3
    )
    assert_same_bits(run_counted(round_trip, *arrays, op="all_to_all", calls=8), tuple(arrays))
    # Between the two, the heads are sharded and the sequence is whole: the same global array.
    heads = P(None, None, "x") if layout == "BSHD" else P(None, "x")
    scattered = sharded(there, mesh(4), in_specs=(spec,), out_specs=heads)
    assert_same_bits(run_counted(scattered, arrays[0], op="all_to_all", calls=4), arrays[0])


@EACH_LAYOUT
@pytest.mark.parametrize("kwargs", ({}, {"is_causal": True}, {"scale": 0.3}), ids=str)
@pytest.mark.parametrize("world", (2, 4))
def test_attention_with_fewer_key_heads(world: int, kwargs: dict[str, Any], layout: str) -> None:
    arrays = _in_layout(layout, Q, K, V)
    got = run_counted(_ulysses(world, layout, **kwargs), *arrays, op="all_to_all", calls=2 * world)
    expected = _plain(*arrays, layout, **kwargs)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    if kwargs:  # or an argument that is dropped would pass
        assert not np.allclose(got, _plain(*arrays, layout), atol=1e-3)


@EACH_LAYOUT
def test_attention_with_equal_heads(layout: str) -> None:
    arrays = _in_layout(layout, Q, Q + 1, Q * 2)
    got = run_counted(_ulysses(8, layout), *arrays, op="all_to_all", calls=16)
    np.testing.assert_allclose(got, _plain(*arrays, layout), rtol=1e-5, atol=1e-5)


@EACH_LAYOUT
def test_mesh_under_plain_jit(layout: str) -> None:
    arrays = _in_layout(layout, Q, K, V)
    program = jax.jit(partial(purlin.ulysses_attention, axis_name="x", mesh=mesh(4), layout=layout))
    got = run_counted(program, *arrays, op="all_to_all", calls=8)
    np.testing.assert_allclose(got, _plain(*arrays, layout), rtol=1e-5, atol=1e-5)


@EACH_LAYOUT
def test_batch_axis_of_a_mesh(layout: str) -> None:
    arrays = _in_layout(layout, Q, K, V)
    kwargs: dict[str, Any] = {"axis_name": "b", "batch_axis": "a", "layout": layout}
    program = jax.jit(
        partial(purlin.ulysses_attention, mesh=reordered_2x4(), is_causal=True, **kwargs)
    )
    got = run_counted(program, *arrays, op="all_to_all", calls=16)
    expected = _plain(*arrays, layout, is_causal=True)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_both_axes_of_a_mesh() -> None:
    q = random_array("float32", (2, 16, 8, 4), 3)
    kwargs: dict[str, Any] = {"axis_name": ("a", "b"), "is_causal": True}
    program = partial(purlin.ulysses_attention, mesh=reordered_2x4(), **kwargs)
    got = run_counted(program, q, q, q, op="all_to_all", calls=16)
    np.testing.assert_allclose(got, _plain(q, q, q, is_causal=True), rtol=1e-5, atol=1e-5)


@EACH_LAYOUT
def test_custom_attention(layout: str) -> None:
    seen = []

    def attn_fn(q: jax.Array, k: jax.Array, v: jax.Array, **kwargs: Any) -> jax.Array:
        seen.append((q.shape, k.shape, kwargs))
        return _plain(q, k, v, layout, **kwargs) * 2

    arrays = _in_layout(layout, Q, K, V)
    program = _ulysses(4, layout, attn_fn=attn_fn, is_causal=True, scale=0.5)
    got = run_counted(program, *arrays, op="all_to_all", calls=8)
    expected = 2 * _plain(*arrays, layout, is_causal=True, scale=0.5)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    shapes = [(2, 16, 2, 4), (2, 16, 1, 4)]
    if layout == "BHSD":
        shapes = [(2, 2, 16, 4), (2, 1, 16, 4)]
    assert seen == [(*shapes, {"is_causal": True, "scale": 0.5})]
    _ulysses(4, layout, attn_fn=attn_fn).lower(*arrays)
    assert seen[-1][-1] == {}  # what is not given is not passed on


@EACH_LAYOUT
def test_gradients(layout: str) -> None:
    arrays = _in_layout(layout, Q, K, V)
    weights = np.cos(arrays[0])

    def grads(f: Fn) -> Any:
        return jax.jit(jax.value_and_grad(lambda *a: (f(*a) * weights).sum(), (0, 1, 2)))

    ours = grads(_ulysses(4, layout, is_causal=True))
    got = run_counted(ours, *arrays, op="all_to_all", calls=4 * 4)
    expected = grads(partial(_plain, layout=layout, is_causal=True))(*arrays)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_bfloat16() -> None:
    arrays = [x.astype(jnp.bfloat16) for x in (Q, K, V)]
    got = run_counted(_ulysses(4), *arrays, op="all_to_all", calls=8)
    assert got.dtype == jnp.bfloat16
    expected = np.asarray(_plain(*arrays), np.float32)
    np.testing.assert_allclose(got.astype(np.float32), expected, rtol=2e-2, atol=2e-2)


@EACH_LAYOUT
def test_queries_keys_and_values_travel_in_one_call(layout: str) -> None:
    hlo = _ulysses(4, layout).lower(*_in_layout(layout, Q, K, V)).compile().as_text()
    assert custom_calls(hlo) == 2
    assert native_collectives(hlo) == []


def test_backend_lax() -> None:
    program = _ulysses(4, backend="lax")
    got = run_counted(program, Q, K, V, op="all_to_all", calls=0)
    assert_same_bits(got, run_counted(_ulysses(4), Q, K, V, op="all_to_all", calls=8))


def test_an_exchange_moves_no_data_around_the_call() -> None:
    def hlo(f: Fn) -> str:
        program = sharded(f, mesh(4), in_specs=P(None, "x"), out_specs=P(None, None, "x"))
        return program.lower(Q).compile().as_text()

    moves = re.compile(r"\s(?:transpose|copy|concatenate)\(|copy_bitcast_fusion")
    assert not moves.findall(hlo(lambda v: purlin.scatter_heads(v, axis_name="x")))
    # jax.lax shows that the expression would find them.
    assert moves.findall(hlo(lambda v: jax.lax.all_to_all(v, "x", 2, 1, tiled=True)))
