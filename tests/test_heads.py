"""Heads that do not divide: plans for real models, replication and padding."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purlin_jax as purlin
from purlin_jax.heads import plan_heads
from tests.attention import (
    EACH_LAYOUT,
    assert_close,
    in_layout,
    plain,
    run_native,
    spec,
    value_and_grads,
)
from tests.harness import P, mesh, random_array, sharded

RANKS = (2, 4, 6, 8)
# (query heads, key/value heads): for each number of ranks, those that are exchanged.
MODELS = {
    "Qwen-Image, Flux": (24, 24, [(24, 24)] * 4),
    "Wan 14B": (40, 40, [(40, 40), (40, 40), (42, 42), (40, 40)]),
    "Wan 1.3B": (12, 12, [(12, 12), (12, 12), (12, 12), (16, 16)]),
    "Z-Image": (30, 30, [(30, 30), (32, 32), (30, 30), (32, 32)]),
    "Z-Image, guidance in the heads": (60, 60, [(60, 60), (60, 60), (60, 60), (64, 64)]),
    "Boogu-Image": (28, 7, [(32, 8), (32, 8), (48, 12), (32, 8)]),
    # 8 ranks: two for each key head, and 7 queries of each padded to 8, not 8 key heads and 56.
    "Qwen2.5-7B": (28, 4, [(28, 4), (28, 4), (42, 6), (32, 8)]),
    "one key head": (32, 1, [(32, 2), (32, 4), (36, 6), (32, 8)]),
}


@pytest.mark.parametrize("model", MODELS)
def test_plans_of_real_models(model: str) -> None:
    q, kv, expected = MODELS[model]
    for world, exchanged in zip(RANKS, expected, strict=True):
        plan = plan_heads("f", q, kv, world, "pad")
        assert (plan.q_exchanged, plan.kv_exchanged) == exchanged
        if exchanged[0] == q:
            assert plan_heads("f", q, kv, world, "error") == plan
        else:
            with pytest.raises(ValueError, match=f"attend with {exchanged[0]} and {exchanged[1]}"):
                plan_heads("f", q, kv, world, "error")


@pytest.mark.parametrize("axis", (1, 2))
def test_every_query_meets_its_key_on_its_rank(axis: int) -> None:
    """Arrays of head numbers, widened and cut into blocks of ranks as the exchange does."""
    for q, kv, world in [(m[0], m[1], w) for m in MODELS.values() for w in RANKS]:
        plan = plan_heads("f", q, kv, world, "pad")

        def numbers(n: int) -> jax.Array:
            return jnp.moveaxis(jnp.arange(1, n + 1).reshape(1, 1, n, 1), 2, axis)

        queries, keys = plan.widen_queries(numbers(q), axis), plan.widen_keys(numbers(kv), axis)
        assert queries.shape[axis] % world == keys.shape[axis] % world == 0
        np.testing.assert_array_equal(plan.narrow_queries(queries, axis), numbers(q))
        pairs = []
        for own_q, own_k in zip(
            np.split(queries.ravel(), world), np.split(keys.ravel(), world), strict=True
        ):
            pairs += zip(own_q, np.repeat(own_k, len(own_q) // len(own_k)), strict=True)
        real = {(int(a), int(b)) for a, b in pairs if a}
        assert real == {(i + 1, i // (q // kv) + 1) for i in range(q)}


@pytest.mark.parametrize(
    ("q", "kv", "world", "policy", "match"),
    (
        (28, 7, 4, "error", r"28 query and 7 key/value heads do not divide over 4 ranks; .* a "
         r"divisor of 7, or pass head_policy='pad' to attend with 32 and 8 heads \(\+14%\)"),
        (8, 3, 2, "pad", "8 query heads are no multiple of 3 key/value heads"),
        (8, 0, 2, "pad", "8 query heads are no multiple of 0 key/value heads"),
        (2, 4, 2, "error", "2 query heads are no multiple of 4 key/value heads"),
        (8, 8, 2, "even", r"no head_policy 'even'; take one of \('error', 'pad', 'uneven'\)"),
    ),
)  # fmt: skip
def test_errors(q: int, kv: int, world: int, policy: str, match: str) -> None:
    with pytest.raises(ValueError, match=f"purlin.f: {match}"):
        plan_heads("f", q, kv, world, policy)


def _arrays(q_heads: int, kv_heads: int, layout: str, dtype: Any = "float32") -> list[np.ndarray]:
    shapes = [(2, 24, n, 4) for n in (q_heads, kv_heads, kv_heads)]
    return in_layout(layout, *(random_array(dtype, shape, i) for i, shape in enumerate(shapes)))


CASES = {
    "each key head on two ranks": (8, 2, 4, "error"),
    "one key head": (8, 1, 8, "error"),
    "padded at the end": (6, 3, 4, "pad"),
    "padded within groups": (6, 2, 4, "pad"),
    "one key head, padded queries": (5, 1, 6, "pad"),
    "padding is not needed": (4, 4, 2, "pad"),
    "uneven": (5, 5, 4, "uneven"),
    "uneven key heads": (6, 3, 4, "uneven"),
    "uneven within groups": (6, 2, 4, "uneven"),
    "more ranks than heads": (3, 3, 8, "uneven"),
}


@EACH_LAYOUT
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(case: str, layout: str) -> None:
    q_heads, kv_heads, world, policy = CASES[case]
    arrays = _arrays(q_heads, kv_heads, layout)

    # A number that all heads share, those of padding too: a NaN of theirs would show in its
    # gradient, and in every output by way of the maximum.
    def attend(q: Any, k: Any, v: Any, share: Any, **kwargs: Any) -> Any:
        o = plain(q * share, k * share, v * share, layout, **kwargs)
        return jnp.where(jnp.isfinite(o).all(), o, jnp.nan)

    def local(q: Any, k: Any, v: Any, share: Any) -> Any:
        return purlin.ulysses_attention(
            q, k, v, axis_name="x", layout=layout, is_causal=True, head_policy=policy,
            attn_fn=partial(attend, share=share),
        )  # fmt: skip

    place = spec(layout)
    ours = sharded(local, mesh(world), in_specs=(place,) * 3 + (P(),), out_specs=place)
    args = (*arrays, np.float32(0.7))
    if policy != "uneven":
        calls = {"all_to_all": 4 * world}
    else:  # q, k and v together where they have as many heads
        calls = {"all_to_all_v": (4 if q_heads == kv_heads else 6) * world}
    got = run_native(value_and_grads(ours, range(4)), *args, **calls)
    expected = value_and_grads(partial(attend, is_causal=True), range(4))(*args)
    assert_close(got, expected)


def test_bfloat16_padded() -> None:
    arrays = _arrays(6, 2, "BSHD", jnp.bfloat16)
    program = partial(purlin.ulysses_attention, axis_name="x", mesh=mesh(4), head_policy="pad")
    got = run_native(jax.jit(program), *arrays, all_to_all=8)
    assert_close(got, plain(*arrays), rtol=2e-2, atol=2e-2)


def test_keys_and_values_of_different_heads() -> None:
    q, k, _ = _arrays(8, 4, "BSHD")
    with pytest.raises(ValueError, match="4 heads of k and 8 of v; give as many"):
        purlin.ulysses_attention(q, k, q, axis_name="x", mesh=mesh(4))
