"""Ulysses attention over a sharded sequence equals plain attention over the whole of it."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purlin_jax as purlin
from tests.attention import (
    EACH_LAYOUT,
    assert_close,
    in_layout,
    plain,
    run_native,
    spec,
    value_and_grads,
)
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

# [batch, sequence, heads, dim]
Q = random_array("float32", (2, 16, 8, 4), 0)
K, V = (random_array("float32", (2, 16, 4, 4), seed) for seed in (1, 2))


def _ulysses(world: int, layout: str = "BSHD", **kwargs: Any) -> Fn:
    f = partial(purlin.ulysses_attention, axis_name="x", layout=layout, **kwargs)
    return sharded(f, mesh(world), in_specs=(spec(layout),) * 3, out_specs=spec(layout))


@EACH_LAYOUT
def test_gather_is_the_inverse_of_scatter(layout: str) -> None:
    def there(*arrays: jax.Array) -> Any:
        return purlin.scatter_heads(*arrays, axis_name="x", layout=layout)

    def back(*arrays: jax.Array) -> Any:
        return purlin.gather_heads(*arrays, axis_name="x", layout=layout)

    arrays = in_layout(layout, Q, K, V.astype(jnp.bfloat16))
    place = spec(layout)
    round_trip = sharded(
        lambda *a: back(*there(*a)), mesh(4), in_specs=(place,) * 3, out_specs=(place,) * 3
    )
    assert_same_bits(run_counted(round_trip, *arrays, op="all_to_all", calls=8), tuple(arrays))
    # Between the two, the heads are sharded and the sequence is whole: the same global array.
    heads = P(None, None, "x") if layout == "BSHD" else P(None, "x")
    scattered = sharded(there, mesh(4), in_specs=(place,), out_specs=heads)
    assert_same_bits(run_counted(scattered, arrays[0], op="all_to_all", calls=4), arrays[0])


@EACH_LAYOUT
@pytest.mark.parametrize("kwargs", ({}, {"is_causal": True}, {"scale": 0.3}), ids=str)
@pytest.mark.parametrize("world", (2, 4))
def test_attention_with_fewer_key_heads(world: int, kwargs: dict[str, Any], layout: str) -> None:
    arrays = in_layout(layout, Q, K, V)
    got = run_counted(_ulysses(world, layout, **kwargs), *arrays, op="all_to_all", calls=2 * world)
    expected = plain(*arrays, layout, **kwargs)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    if kwargs:  # or an argument that is dropped would pass
        assert not np.allclose(got, plain(*arrays, layout), atol=1e-3)


@EACH_LAYOUT
def test_attention_with_equal_heads(layout: str) -> None:
    arrays = in_layout(layout, Q, Q + 1, Q * 2)
    got = run_counted(_ulysses(8, layout), *arrays, op="all_to_all", calls=16)
    np.testing.assert_allclose(got, plain(*arrays, layout), rtol=1e-5, atol=1e-5)


@EACH_LAYOUT
def test_mesh_under_plain_jit(layout: str) -> None:
    arrays = in_layout(layout, Q, K, V)
    program = jax.jit(partial(purlin.ulysses_attention, axis_name="x", mesh=mesh(4), layout=layout))
    got = run_counted(program, *arrays, op="all_to_all", calls=8)
    np.testing.assert_allclose(got, plain(*arrays, layout), rtol=1e-5, atol=1e-5)


@EACH_LAYOUT
def test_batch_axis_of_a_mesh(layout: str) -> None:
    arrays = in_layout(layout, Q, K, V)
    kwargs: dict[str, Any] = {"axis_name": "b", "batch_axis": "a", "layout": layout}
    program = jax.jit(
        partial(purlin.ulysses_attention, mesh=reordered_2x4(), is_causal=True, **kwargs)
    )
    got = run_counted(program, *arrays, op="all_to_all", calls=16)
    expected = plain(*arrays, layout, is_causal=True)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_both_axes_of_a_mesh() -> None:
    q = random_array("float32", (2, 16, 8, 4), 3)
    kwargs: dict[str, Any] = {"axis_name": ("a", "b"), "is_causal": True}
    program = partial(purlin.ulysses_attention, mesh=reordered_2x4(), **kwargs)
    got = run_counted(program, q, q, q, op="all_to_all", calls=16)
    np.testing.assert_allclose(got, plain(q, q, q, is_causal=True), rtol=1e-5, atol=1e-5)


@EACH_LAYOUT
def test_custom_attention(layout: str) -> None:
    seen = []

    def attn_fn(q: jax.Array, k: jax.Array, v: jax.Array, **kwargs: Any) -> jax.Array:
        seen.append((q.shape, k.shape, kwargs))
        return plain(q, k, v, layout, **kwargs) * 2

    arrays = in_layout(layout, Q, K, V)
    program = _ulysses(4, layout, attn_fn=attn_fn, is_causal=True, scale=0.5)
    got = run_counted(program, *arrays, op="all_to_all", calls=8)
    expected = 2 * plain(*arrays, layout, is_causal=True, scale=0.5)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    shapes = [(2, 16, 2, 4), (2, 16, 1, 4)]
    if layout == "BHSD":
        shapes = [(2, 2, 16, 4), (2, 1, 16, 4)]
    assert seen == [(*shapes, {"is_causal": True, "scale": 0.5})]
    _ulysses(4, layout, attn_fn=attn_fn).lower(*arrays)
    assert seen[-1][-1] == {}  # what is not given is not passed on


@EACH_LAYOUT
def test_gradients(layout: str) -> None:
    arrays = in_layout(layout, Q, K, V)
    weights = np.cos(arrays[0])

    def grads(f: Fn) -> Any:
        return jax.jit(jax.value_and_grad(lambda *a: (f(*a) * weights).sum(), (0, 1, 2)))

    ours = grads(_ulysses(4, layout, is_causal=True))
    got = run_counted(ours, *arrays, op="all_to_all", calls=4 * 4)
    expected = grads(partial(plain, layout=layout, is_causal=True))(*arrays)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_bfloat16() -> None:
    arrays = [x.astype(jnp.bfloat16) for x in (Q, K, V)]
    got = run_counted(_ulysses(4), *arrays, op="all_to_all", calls=8)
    assert got.dtype == jnp.bfloat16
    expected = np.asarray(plain(*arrays), np.float32)
    np.testing.assert_allclose(got.astype(np.float32), expected, rtol=2e-2, atol=2e-2)


@EACH_LAYOUT
def test_queries_keys_and_values_travel_in_one_call(layout: str) -> None:
    hlo = _ulysses(4, layout).lower(*in_layout(layout, Q, K, V)).compile().as_text()
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


@EACH_LAYOUT
def test_lengths_of_padded_sequences(layout: str) -> None:
    arrays = in_layout(layout, Q, K, V)
    for given in ({"key_value_seq_lengths": [11, 16]}, {"query_seq_lengths": [16, 3]}):
        lengths = {name: np.array(x, np.int32) for name, x in given.items()}
        ours = partial(_with_lengths, mesh(4), layout)
        theirs = partial(_plain_with_lengths, layout)
        got = run_native(value_and_grads(ours, range(3)), *arrays, lengths, all_to_all=16)
        assert_close(got, value_and_grads(theirs, range(3))(*arrays, lengths))
        assert not np.allclose(got[1], plain(*arrays, layout), atol=1e-2)


def _with_lengths(devices: Any, layout: str, q: Any, k: Any, v: Any, lengths: Any) -> Any:
    def local(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return purlin.ulysses_attention(q, k, v, axis_name="x", layout=layout, **lengths)

    place = spec(layout)
    program = sharded(local, devices, in_specs=(place,) * 3 + (P(),), out_specs=place)
    return program(q, k, v, lengths)


def _plain_with_lengths(layout: str, q: Any, k: Any, v: Any, lengths: Any) -> Any:
    return plain(q, k, v, layout, **lengths)


def test_lengths_follow_the_batch_axis_of_a_mesh() -> None:
    lengths = np.array([5, 16])  # of any integer type
    program = partial(purlin.ulysses_attention, axis_name="b", batch_axis="a", mesh=reordered_2x4())
    got = run_native(
        jax.jit(lambda n: program(Q, K, V, key_value_seq_lengths=n)), lengths, all_to_all=16
    )
    assert_close(got, plain(Q, K, V, key_value_seq_lengths=lengths.astype(np.int32)))


def test_lengths_reach_a_custom_attention() -> None:
    seen = []

    def attn_fn(q: jax.Array, k: jax.Array, v: jax.Array, **kwargs: Any) -> jax.Array:
        seen.append({name: (x.shape, x.dtype) for name, x in kwargs.items()})
        return q

    _ulysses(4, attn_fn=attn_fn, key_value_seq_lengths=np.array([5, 16])).lower(Q, K, V)
    assert seen == [{"key_value_seq_lengths": ((2,), np.int32)}]


@pytest.mark.parametrize("lengths", (np.array([5]), np.array([5.0, 16.0]), np.int32(5)), ids=str)
def test_lengths_that_do_not_fit(lengths: Any) -> None:
    with pytest.raises(ValueError, match="give one integer for each of the 2 sequences"):
        _ulysses(4, query_seq_lengths=lengths).lower(Q, K, V)


def test_under_checkpoint_and_vmap() -> None:
    many = [np.stack([x, np.cos(x)]) for x in (Q, K, V)]
    place = P(None, None, "x")
    one = jax.checkpoint(partial(purlin.ulysses_attention, axis_name="x", is_causal=True))
    ours = sharded(jax.vmap(one), mesh(4), in_specs=(place,) * 3, out_specs=place)
    # The checkpoint has the arrays exchanged again, where the compiler does not keep them.
    got = run_native(value_and_grads(ours, range(3)), *many, all_to_all=(4 * 4, 5 * 4))
    expected = value_and_grads(jax.vmap(partial(plain, is_causal=True)), range(3))(*many)
    assert_close(got, expected)


# A block of projections around attention. Attention is elementwise, so that no transpose or copy
# is its own.

WIDTH, HEADS, DIM = 32, 8, 4


def _elementwise(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.tanh(q) * k + v


def _transposed_by_hand(*qkv: jax.Array) -> jax.Array:
    qkv = tuple(x.swapaxes(1, 2) for x in qkv)
    kwargs: dict[str, Any] = {"axis_name": "x", "layout": "BHSD", "attn_fn": _elementwise}
    return purlin.ulysses_attention(*qkv, **kwargs).swapaxes(1, 2)


_EXCHANGED = partial(purlin.ulysses_attention, axis_name="x", attn_fn=_elementwise)
_TRANSPOSED = (partial(_EXCHANGED, backend="lax"), _transposed_by_hand)


def _block_hlo(attention: Fn, argnums: tuple[int, ...]) -> str:
    """The compiled block, or its gradients with respect to activations (0) and weights (1, 2)."""

    def local(x: jax.Array, qkv: jax.Array, out: jax.Array) -> jax.Array:
        heads = (*x.shape[:2], HEADS, DIM)
        o = attention(*(y.reshape(heads) for y in jnp.split(x @ qkv, 3, -1)))
        return o.reshape(*x.shape[:2], HEADS * DIM) @ out

    place = P(None, "x")
    block = sharded(local, mesh(4), in_specs=(place, P(), P()), out_specs=place)
    if argnums:
        forward = block
        block = jax.jit(jax.grad(lambda *args: (forward(*args) ** 2).sum(), argnums))
    shapes = ((2, 16, WIDTH), (WIDTH, 3 * HEADS * DIM), (HEADS * DIM, WIDTH))
    return block.lower(*(np.ones(s, np.float32) for s in shapes)).compile().as_text()


def _moves(hlo: str) -> Counter[tuple[str, str]]:
    """Shapes of all transposes and copies, those inside fusions too."""
    return Counter(re.findall(r"= (\w+\[[\d,]*\])\S* (transpose|copy)\(", hlo))


@pytest.mark.parametrize("argnums", ((), (0,), (0, 1, 2)), ids=str)
def test_a_block_has_no_transpose_around_its_exchanges(argnums: tuple[int, ...]) -> None:
    hlo = _block_hlo(_EXCHANGED, argnums)
    assert custom_calls(hlo) == (4 if argnums else 2)
    # A CPU transposes an operand of the matmul of a weight's gradient, exchange or not.
    without = _moves(_block_hlo(_elementwise, argnums))
    assert bool(without) == (1 in argnums)
    assert not _moves(hlo) - without
    for attention in _TRANSPOSED:  # or the expression would find nothing at all
        extra = _moves(_block_hlo(attention, argnums)) - without
        assert extra.total() >= 4
