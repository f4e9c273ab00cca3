"""Joint tokens: attention over a sharded image and its text equals attention on one device."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import purlin_jax as purlin
from purlin_jax import _native
from tests.attention import (
    assert_close,
    in_layout,
    plain_joint,
    run_native,
    spec,
    value_and_grads,
)
from tests.harness import (
    P,
    custom_calls,
    mesh,
    native_collectives,
    random_array,
    reordered_2x4,
    sharded,
)

EACH_ORDER = pytest.mark.parametrize(("layout", "where"), (("BSHD", "front"), ("BHSD", "rear")))
EACH_PLACEMENT = pytest.mark.parametrize("placement", ("replicated", "sharded"))
IMAGE, TEXT = 16, 8


def _arrays(
    heads: tuple[int, int] = (8, 4), layout: str = "BSHD", dtype: Any = "float32", **static: str
) -> tuple[Any, ...]:
    """q, k, v and Joint: all different, so that no two can be taken for each other."""
    shapes = [(2, s, h, 4) for s in (IMAGE, TEXT) for h in (heads[0], heads[1], heads[1])]
    made = in_layout(layout, *(random_array(dtype, s, seed) for seed, s in enumerate(shapes)))
    return *made[:3], purlin.Joint(*made[3:], **static)


def _text_spec(placement: str, layout: str = "BSHD") -> Any:
    return P() if placement == "replicated" else spec(layout)


def _in_shard_map(
    world: int, placement: str, layout: str = "BSHD", check_vma: bool = True, **kwargs: Any
) -> Any:
    def local(q: Any, k: Any, v: Any, joint: purlin.Joint) -> Any:
        return purlin.ulysses_attention(
            q, k, v, joint=joint, axis_name="x", layout=layout, **kwargs
        )

    image, text = spec(layout), _text_spec(placement, layout)
    return sharded(
        local,
        mesh(world),
        in_specs=(image, image, image, text),
        out_specs=(image, text),
        check_vma=check_vma,
    )


# A call of scatter_heads with the arrays of image and text; all others fit in one.
SIX = -(-6 // _native.max_operands)


def _calls(placement: str, world: int, check_vma: bool, backward: bool) -> dict[str, int]:
    """Native collectives of one attention; a program without a backward pass has half of them."""
    scatter = SIX if placement == "sharded" else 1
    calls = {"all_to_all": (2 if backward else 1) * (scatter + 1) * world}
    if placement == "replicated":
        calls["all_gather"] = world
        if backward and not check_vma:
            calls["reduce_scatter"] = world
    return calls


HEADS = {
    "even": ((8, 4), "error"),
    "replicated": ((8, 2), "error"),
    "padded": ((6, 3), "pad"),
}


@EACH_PLACEMENT
@EACH_ORDER
@pytest.mark.parametrize(
    ("heads", "check_vma", "is_causal"),
    (("even", True, False), ("replicated", False, True), ("padded", True, True)),
)
def test_outputs_and_gradients(
    heads: str, check_vma: bool, is_causal: bool, layout: str, where: str, placement: str
) -> None:
    (counts, policy), world = HEADS[heads], 4
    args = _arrays(counts, layout, where=where, placement=placement)
    kwargs = {"is_causal": is_causal, "scale": 0.4}
    ours = _in_shard_map(world, placement, layout, check_vma, head_policy=policy, **kwargs)
    calls = _calls(placement, world, check_vma, backward=True)
    got = run_native(value_and_grads(ours, range(4)), *args, **calls)
    expected = value_and_grads(partial(plain_joint, layout=layout, **kwargs), range(4))(*args)
    assert_close(got, expected)


def test_the_oracle_tells_the_places_apart() -> None:
    """Or a text in the wrong place, or one that nobody looks at, would pass."""
    front, rear = (plain_joint(*_arrays(where=w), is_causal=True) for w in ("front", "rear"))
    for a, b in zip(front, rear, strict=True):
        assert not np.allclose(a, b, atol=1e-2)


@EACH_PLACEMENT
@pytest.mark.parametrize("where", ("front", "rear"))
def test_attention_sees_the_text_in_one_piece(where: str, placement: str) -> None:
    """All of the text, then all of the image: not text and image of each rank in turn."""

    def attn_fn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        # The position that attention sees, against the value that says where it belongs.
        assert q.shape == (2, IMAGE + TEXT, 2, 4) and k.shape == v.shape == (2, IMAGE + TEXT, 1, 4)
        unused = 0 * (k.sum() + v.sum())  # or they would not be exchanged
        return q - jnp.arange(IMAGE + TEXT, dtype=q.dtype)[:, None, None] + unused

    q, k, v, joint = _arrays(where=where, placement=placement)
    text_at, image_at = (0, TEXT) if where == "front" else (IMAGE, 0)
    q = np.broadcast_to(np.arange(IMAGE)[:, None, None] + image_at, q.shape).astype(np.float32)
    text = np.broadcast_to(np.arange(TEXT)[:, None, None] + text_at, joint.q.shape)
    joint = purlin.Joint(text.astype(np.float32), joint.k, joint.v, where, placement)
    program = _in_shard_map(4, placement, attn_fn=attn_fn)
    got = run_native(program, q, k, v, joint, **_calls(placement, 4, True, backward=False))
    assert_close(got, (np.zeros_like(q), np.zeros_like(joint.q)), atol=0, rtol=0)


@EACH_PLACEMENT
@EACH_ORDER
def test_global_arrays(layout: str, where: str, placement: str) -> None:
    args = _arrays((8, 8), layout, where=where, placement=placement)
    devices = reordered_2x4()
    program = partial(
        purlin.ulysses_attention, axis_name="b", batch_axis="a", mesh=devices, layout=layout
    )

    def call(q: Any, k: Any, v: Any, joint: purlin.Joint) -> Any:
        return program(q, k, v, joint=joint)

    calls = _calls(placement, 8, True, backward=True)
    got = run_native(value_and_grads(call, range(4)), *args, **calls)
    assert_close(got, value_and_grads(partial(plain_joint, layout=layout), range(4))(*args))
    # The text's output comes placed as the text.
    sequence = None if placement == "replicated" else "b"
    placed = jax.jit(call).lower(*args).compile().output_shardings
    places = (spec(layout, "a", "b"), spec(layout, "a", sequence))
    for sharding, place in zip(placed, places, strict=True):
        assert sharding.is_equivalent_to(NamedSharding(devices, place), 4)


@EACH_PLACEMENT
def test_both_axes_of_a_mesh(placement: str) -> None:
    args = _arrays((8, 8), placement=placement)
    program = partial(purlin.ulysses_attention, axis_name=("a", "b"), mesh=reordered_2x4())
    calls = _calls(placement, 8, True, backward=False)
    got = run_native(jax.jit(lambda *a: program(*a[:3], joint=a[3])), *args, **calls)
    assert_close(got, plain_joint(*args))


@EACH_PLACEMENT
def test_mesh_of_explicit_axes(placement: str) -> None:
    args = _arrays(placement=placement)
    program = partial(
        purlin.ulysses_attention,
        axis_name="x",
        mesh=mesh(4, axis_types=(AxisType.Explicit,)),
        key_value_seq_lengths=np.array([20, 9]),
    )
    calls = _calls(placement, 4, True, backward=False)
    got = run_native(jax.jit(lambda *a: program(*a[:3], joint=a[3])), *args, **calls)
    assert_close(got, plain_joint(*args, key_value_seq_lengths=np.array([20, 9], np.int32)))


@EACH_PLACEMENT
def test_lengths_count_the_text_in_front(placement: str) -> None:
    args = _arrays(placement=placement)
    lengths = np.array([TEXT + 5, TEXT + IMAGE], np.int32)
    program = _in_shard_map(4, placement, key_value_seq_lengths=lengths)
    got = run_native(program, *args, **_calls(placement, 4, True, backward=False))
    assert_close(got, plain_joint(*args, key_value_seq_lengths=lengths))
    assert not np.allclose(got[0], plain_joint(*args)[0], atol=1e-2)


@EACH_PLACEMENT
@pytest.mark.parametrize("check_vma", (True, False))
def test_under_checkpoint_and_vmap(check_vma: bool, placement: str) -> None:
    many = jax.tree.map(
        lambda *x: np.stack(x), *(_arrays(h, placement=placement) for h in [(8, 4)])
    )
    many = jax.tree.map(lambda x: np.concatenate([x, np.cos(x)]), many)

    def local(*args: Any) -> Any:
        def one(q: Any, k: Any, v: Any, joint: purlin.Joint) -> Any:
            return purlin.ulysses_attention(q, k, v, joint=joint, axis_name="x")

        return jax.vmap(jax.checkpoint(one))(*args)

    image = P(None, None, "x")
    text = P() if placement == "replicated" else image
    ours = sharded(
        local,
        mesh(4),
        in_specs=(image, image, image, text),
        out_specs=(image, text),
        check_vma=check_vma,
    )
    calls: dict[str, Any] = _calls(placement, 4, check_vma, backward=True)
    once = calls["all_to_all"]
    # The checkpoint has the arrays exchanged again, where the compiler does not keep them.
    calls["all_to_all"] = (once, once + 4 * (SIX if placement == "sharded" else 1))
    got = run_native(value_and_grads(ours, range(4)), *many, **calls)
    assert_close(got, value_and_grads(jax.vmap(plain_joint), range(4))(*many))


@EACH_PLACEMENT
@pytest.mark.parametrize("check_vma", (True, False))
def test_bfloat16(check_vma: bool, placement: str) -> None:
    args = _arrays(dtype=jnp.bfloat16, placement=placement)
    calls = _calls(placement, 4, check_vma, backward=False)
    got = run_native(_in_shard_map(4, placement, check_vma=check_vma), *args, **calls)
    assert_close(got, plain_joint(*args), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("placement", "check_vma", "calls"),
    (("sharded", True, SIX + 1), ("replicated", True, 3), ("replicated", False, 3)),
)
def test_text_travels_with_the_image(placement: str, check_vma: bool, calls: int) -> None:
    program = _in_shard_map(4, placement, check_vma=check_vma)
    hlo = program.lower(*_arrays(placement=placement)).compile().as_text()
    assert custom_calls(hlo) == calls
    assert native_collectives(hlo) == []


def test_backend_lax() -> None:
    for placement, check_vma in itertools.product(("replicated", "sharded"), (True, False)):
        args = _arrays(placement=placement)
        got = run_native(_in_shard_map(4, placement, check_vma=check_vma, backend="lax"), *args)
        assert_close(got, plain_joint(*args))


def test_a_pytree_of_its_arrays() -> None:
    joint = _arrays(where="rear", placement="sharded")[3]
    leaves, tree = jax.tree.flatten(joint)
    assert [x is y for x, y in zip(leaves, (joint.q, joint.k, joint.v), strict=True)] == [True] * 3
    again = jax.tree.unflatten(tree, leaves)
    assert (again.where, again.placement) == ("rear", "sharded")
    assert jax.tree.structure(_arrays()[3]) != tree  # the static fields are part of jit's key


def test_errors_of_joint() -> None:
    q, k, v, joint = _arrays()
    with pytest.raises(ValueError, match=r"no where='back'; take one of \('front', 'rear'\)"):
        purlin.Joint(q, k, v, where="back")
    with pytest.raises(ValueError, match=r"no placement='split'; take one of \('replicated', 's"):
        purlin.Joint(q, k, v, placement="split")
    program = partial(purlin.ulysses_attention, q, k, v, axis_name="x", mesh=mesh(4))
    wrong = purlin.Joint(joint.q[:, :, :4], joint.k, joint.v)
    with pytest.raises(ValueError, match=r"joint.q is float32\[2, 8, 4, 4\] and q is float32"):
        program(joint=wrong)
    wrong = purlin.Joint(joint.q, joint.k, joint.v.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"joint.v is bfloat16.*; they may differ along axis 1,"):
        program(joint=wrong)
    wrong = purlin.Joint(joint.q, joint.k[0], joint.v)
    with pytest.raises(ValueError, match=r"joint.k is float32\[8, 4, 4\] and k is"):
        program(joint=wrong)
    rear = purlin.Joint(joint.q, joint.k, joint.v, where="rear")
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        with pytest.raises(ValueError, match=rf"{name} counts from the front.*put them in front"):
            program(joint=rear, **{name: np.array([20, 20])})
