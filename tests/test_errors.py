"""What is wrong with a call is said in a sentence that names the call, the sizes and the remedy."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import purlin_jax as purlin
from purlin_jax import _native
from tests.harness import Fn, mesh, sharded

X = np.zeros((16, 8, 6), np.float32)


def _trace(f: Fn, x: Any = X, world: int = 4) -> None:
    jax.eval_shape(sharded(f, mesh(world)), x)


CALLS = {
    "all_to_all": lambda v: purlin.all_to_all(v, "x", 1, 0, tiled=True),
    "all_reduce": lambda v: purlin.all_reduce(v, "x"),
    "scatter_heads": lambda v: purlin.scatter_heads(v, axis_name="x"),
    "gather_heads": lambda v: purlin.gather_heads(v, axis_name="x"),
    "psum": lambda v: purlin.psum(v, "x"),
    "pmean": lambda v: purlin.pmean(v, "x"),
    "psum_scatter": lambda v: purlin.psum_scatter(v, "x"),
    "ulysses_attention": lambda v: purlin.ulysses_attention(v, v, v, axis_name="x"),
}


@pytest.mark.parametrize("name", CALLS)
def test_outside_shard_map(name: str) -> None:
    for f in (CALLS[name], jax.jit(CALLS[name])):
        with pytest.raises(
            NameError, match=rf"purlin\.{name}: axis 'x' is not bound; call it inside jax\.shard"
        ):
            f(np.zeros((2, 8, 8, 4), np.float32))


@pytest.mark.parametrize("dtype", ("int2", "uint2"))
@pytest.mark.parametrize("name", ("all_to_all", "all_reduce"))
@pytest.mark.parametrize("backend", ("auto", "lax"))
def test_dtypes_of_two_bits(backend: str, name: str, dtype: str) -> None:
    match = rf"purlin\.{name}: no collective carries {dtype}; widen it to int8 or int4"
    with purlin.backend(backend), pytest.raises(TypeError, match=match):
        _trace(CALLS[name], X.astype(dtype))


def test_other_axis_inside_shard_map() -> None:
    with pytest.raises(NameError, match=r"purlin\.all_reduce: axis 'y' is not bound"):
        _trace(lambda v: purlin.all_reduce(v, ("x", "y")))


def test_errors_name_what_was_called() -> None:
    with pytest.raises(ValueError, match=r"purlin\.psum_scatter: axis 1 of \(4, 6\) does not"):
        _trace(lambda v: purlin.psum_scatter(v[:, 0], "x", scatter_dimension=1, tiled=True))
    with pytest.raises(ValueError, match=r"purlin\.gather_heads: axis 1 of \(4, 6, 8, 1\) does"):
        _trace(lambda v: purlin.gather_heads(v.transpose(0, 2, 1)[..., None], axis_name="x"))
    with pytest.raises(NotImplementedError, match=r"purlin\.pmax: 'max' has no derivative"):
        _trace(jax.grad(lambda v: purlin.pmax(v, "x").sum()))


def test_arguments_count_where_nothing_is_sent() -> None:
    with pytest.raises(ValueError, match="no backend 'fast'"):
        _trace(lambda v: v + purlin.psum(1.0, "x", backend="fast"))
    with pytest.raises(TypeError, match=r"policy=3; take a purlin\.Policy, or the name"):
        _trace(lambda v: v + purlin.psum(1.0, "x", policy=3))  # type: ignore[arg-type]


def test_sizes_that_do_not_divide() -> None:
    match = r"axis 2 of \(4, 8, 6\) does not divide over 4 ranks; pad it to 8"
    with pytest.raises(ValueError, match=match):
        _trace(lambda v: purlin.all_to_all(v, "x", -1, 0, tiled=True))


def test_untiled_axis_of_the_wrong_size() -> None:
    match = r"untiled, axis 1 of \(4, 8, 6\) must have the size 4 .* pass tiled=True"
    with pytest.raises(ValueError, match=match):
        _trace(lambda v: purlin.all_to_all(v, "x", 1, 0))


@pytest.mark.parametrize(("split", "concat"), ((3, 0), (-4, 0), (0, 3), (0, -4)))
@pytest.mark.parametrize("tiled", (True, False))
def test_axis_out_of_range(split: int, concat: int, tiled: bool) -> None:
    what = f"concat_axis={concat}" if split == 0 else f"split_axis={split}"
    with pytest.raises(ValueError, match=f"all_to_all: {what} is outside an array of rank 3"):
        _trace(lambda v: purlin.all_to_all(v, "x", split, concat, tiled=tiled))


def test_scalars_have_no_axis() -> None:
    with pytest.raises(ValueError, match="split_axis=0 is outside an array of rank 0"):
        _trace(lambda v: purlin.all_to_all(v[0, 0, 0], "x", 0, 0, tiled=True))


def test_one_bad_leaf_of_a_pytree() -> None:
    with pytest.raises(ValueError, match=r"axis 1 of \(4, 3\) does not divide"):
        _trace(lambda v: purlin.all_to_all([v, v[:, :3, 0]], "x", 1, 0, tiled=True))


@pytest.mark.parametrize("op", ("maximum", "mean", "", None))
def test_unknown_reduction(op: str | None) -> None:
    with pytest.raises(ValueError, match=rf"purlin\.all_reduce: no reduction {op!r}; take one of"):
        _trace(lambda v: purlin.all_reduce(v, "x", op))


@pytest.mark.parametrize(
    ("groups", "match"),
    (
        ([[0, 1], [2]], "each of the 4 indices of the axis exactly once"),
        ([[0, 1], [1, 3]], "each of the 4 indices of the axis exactly once"),
        ([[0, 1], [2, 4]], "each of the 4 indices of the axis exactly once"),
        ([], "each of the 4 indices of the axis exactly once"),
        ([[0, 1, 2], [3]], "have different sizes; make them equal"),
    ),
)
@pytest.mark.parametrize("op", ("all_to_all", "all_reduce"))
def test_bad_groups(op: str, groups: list[list[int]], match: str) -> None:
    kwargs = {"axis_index_groups": groups}
    calls = {
        "all_to_all": lambda v: purlin.all_to_all(v, "x", 1, 0, tiled=True, **kwargs),
        "all_reduce": lambda v: purlin.all_reduce(v, "x", **kwargs),
    }
    with pytest.raises(ValueError, match=rf"purlin\.{op}: axis_index_groups .*{match}"):
        _trace(calls[op])


def test_heads_that_do_not_divide() -> None:
    x = np.zeros((2, 16, 6, 4), np.float32)
    program = jax.jit(lambda q: purlin.ulysses_attention(q, q, q, axis_name="x", mesh=mesh(4)))
    match = "6 query and 6 key/value heads do not divide over 4 ranks; shard .*head_policy='pad' to"
    with pytest.raises(ValueError, match=match):
        program(x)
    match = "6 heads do not divide over 4 ranks; shard the sequence .* or pad the heads to 8"
    with pytest.raises(ValueError, match=match):
        _trace(lambda v: purlin.scatter_heads(v[..., None], axis_name="x"))


def test_wrong_rank_and_layout() -> None:
    with pytest.raises(ValueError, match="BSHD has four axes, got shape"):
        _trace(lambda v: purlin.scatter_heads(v, axis_name="x"))
    for f in (purlin.scatter_heads, purlin.gather_heads):
        with pytest.raises(ValueError, match="layout 'SBHD' is unknown; take 'BSHD' or 'BHSD'"):
            _trace(lambda v, f=f: f(v[None], axis_name="x", layout="SBHD"))


def test_unknown_collective_of_the_native_module() -> None:
    with pytest.raises(ValueError, match="no collective is called 'broadcast'"):
        _native.plan("broadcast", [4], 4, 2, 0, 0)
    with pytest.raises(ValueError, match="axis 0 of size 3 does not divide over 2 ranks"):
        _native.plan("all_to_all", [3], 4, 2, 0, 0)
    with pytest.raises(ValueError, match="concat axis 1 is outside an array of rank 1"):
        _native.result_shape("all_gather", [3], 2, 0, 1)


def test_whole_arrays_that_do_not_divide() -> None:
    grid = mesh(4, ("sp", "dp"), (2, 2))
    x = np.zeros((4, 6, 2, 8), np.float32)

    def attend(x: Any, **kwargs: Any) -> None:
        jax.eval_shape(
            lambda x: purlin.ulysses_attention(x, x, x, axis_name="sp", mesh=grid, **kwargs), x
        )

    attend(x, batch_axis="dp")
    with pytest.raises(ValueError, match=r"axis 1 of q \[4, 5, 2, 8\] does not divide over the 2"):
        attend(x[:, :5])
    with pytest.raises(ValueError, match=r"axis 0 of q \[3, 6, 2, 8\] does not .*'dp'.*; pad it"):
        attend(x[:3], batch_axis="dp")
    with pytest.raises(ValueError, match=r"BSHD has four axes, got shape \(4, 6, 2\)"):
        attend(x[..., 0])
    with pytest.raises(ValueError, match=r"the mesh has axes \('sp', 'dp'\), not \['tp'\]"):
        attend(x, batch_axis="tp")
    text = x[:, :3]
    attend(x, joint=purlin.Joint(text, text, text))
    sharded_text = purlin.Joint(text, text, text, placement="sharded")
    with pytest.raises(ValueError, match=r"axis 1 of joint\.q \[4, 3, 2, 8\] does not divide"):
        attend(x, joint=sharded_text)
