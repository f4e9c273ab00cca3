"""What users of other libraries reported, as inputs for ours, each with its whole kind.

Rows are numbered as in the list they were taken from. What needs a GPU, several processes or a
clock is not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import purlin_jax as purlin
from tests.harness import (
    EACH_OP,
    FOUR_OPS,
    VMA,
    Fn,
    P,
    all_reduced,
    assert_like_lax,
    assert_same_bits,
    collective_pair,
    custom_calls,
    exchanged,
    mesh,
    native_collectives,
    random_array,
    reordered_2x4,
    run_counted,
    sharded,
    summed,
    to_numpy,
)

WORLDS = (2, 3, 5, 8)
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
# Over the first axis, which the ranks have each whole.
CALLS: dict[str, Fn] = {
    "all_reduce": lambda v: purlin.all_reduce(v, "x"),
    "all_to_all": lambda v: purlin.all_to_all(v, "x", 0, 0, tiled=True),
    "all_gather": lambda v: purlin.all_gather(v, "x", tiled=True),
    "reduce_scatter": lambda v: purlin.reduce_scatter(v, "x", tiled=True),
}


def _oracle(op: str, shards: Sequence[np.ndarray]) -> np.ndarray:
    """What the ranks hold after CALLS[op], one after another, in numpy."""
    world = len(shards)
    if op == "all_to_all":
        return np.concatenate(exchanged(shards, 0, 0))
    if op == "all_gather":
        return np.concatenate([*shards] * world)
    total = all_reduced(np.concatenate(shards), world)
    return total if op == "all_reduce" else np.split(total, world)[0]


def _run(op: str, tree: Any, world: int, f: Fn | None = None, calls: int | None = None) -> Any:
    """CALLS[op], or f, on arrays whose first axis holds the ranks' arrays; purlin must run it."""
    program = sharded(f or CALLS[op], mesh(world), check_vma=False)
    leaves = len(jax.tree.leaves(tree))
    made = -(-leaves // 4) if calls is None else calls  # four travel in one call
    return run_counted(program, tree, op=op, calls=made * world)


def _check(op: str, tree: Any, world: int) -> None:
    expected = jax.tree.map(lambda v: _oracle(op, np.split(np.asarray(v), world)), tree)
    assert_same_bits(_run(op, tree, world), expected)


# Sizes and alignment.


def test_row_1_a_size_that_nothing_divides() -> None:
    n = 10_556_587

    def f(_: jax.Array) -> Any:
        x = (jnp.arange(n) % 251 + jax.lax.axis_index("x")).astype(jnp.float32)
        y = purlin.all_reduce(x, "x")
        g = purlin.all_gather(x, "x", tiled=True)
        wrong = (y != 2 * (jnp.arange(n) % 251) + 1).sum()
        return wrong[None], y[-1:], (g[:n] != x - jax.lax.axis_index("x")).sum()[None], g[-1:]

    wrong, last, moved, end = _run("all_reduce", jnp.zeros(2), 2, f)
    assert (wrong == 0).all() and (moved == 0).all()
    assert (last == 2 * ((n - 1) % 251) + 1).all() and (end == (n - 1) % 251 + 1).all()


@EACH_OP
@pytest.mark.parametrize("dtype", ("uint8", "float32"))
def test_row_4_sizes_around_powers_of_two(op: str, dtype: str) -> None:
    steps = (-16, -3, -1, 0, 1, 2, 7, 15, 16)
    sizes = {2**k + d for k in range(17) for d in steps} | {2**20 + d for d in (-1, 0, 7)}
    item = np.dtype(dtype).itemsize
    # Without 0, which is row 10: jaxlib 0.11.2 crashes compiling a sharded program that takes
    # an empty array beside others, whatever is done with them.
    sizes = sorted({n // item for n in sizes if n >= item})
    world = 2
    rows = 1 if op in ("all_reduce", "all_gather") else world
    _check(op, [random_array(dtype, (world * rows, n), n) for n in sizes], world)


@pytest.mark.parametrize("op", ("all_reduce", "reduce_scatter"))
def test_row_5_bytes_that_no_vector_divides(op: str) -> None:
    rank = np.repeat([1, 2], 2)[:, None]
    tree = {n: np.broadcast_to(rank, (4, n)).astype("bfloat16") for n in range(1, 258)}
    got = _run(op, tree, 2)
    for n, y in got.items():
        assert y.shape == (4 if op == "all_reduce" else 2, n) and (y == 3).all(), n


@EACH_OP
@pytest.mark.parametrize("regime", ("meet", "packet", "zero_staging"))
@pytest.mark.parametrize("world", (3, 5, 6, 7))
def test_row_6_odd_worlds(world: int, regime: str, op: str) -> None:
    x = np.repeat(np.arange(world, dtype=np.int32), world)[:, None] + np.zeros((1, 1000), np.int32)
    with purlin.policy(regime):
        got = _run(op, x, world)
    assert_same_bits(got, _oracle(op, np.split(x, world)))
    if op in ("all_reduce", "reduce_scatter"):
        assert (got == world * (world - 1) // 2).all()


@EACH_OP
@pytest.mark.parametrize("dtype", ("bfloat16", "int8", "float32"))
def test_row_7_slices_at_odd_addresses(op: str, dtype: str) -> None:
    x = random_array(dtype, (2 * 7, 3))

    def parts(v: Any) -> list[Any]:
        return [v[1:3], v[2:4], v[3:5], v[5:7], v[1:7, 1:2], v[::3][:2]]

    got = _run(op, x, 2, lambda v: CALLS[op](parts(v)), calls=2)
    shards = [parts(s) for s in np.split(x, 2)]
    expected = [_oracle(op, [a, b]) for a, b in zip(*shards, strict=True)]
    assert_same_bits(got, expected)


@EACH_OP
def test_row_9_counts_beside_a_multiple_of_four(op: str) -> None:
    # The report was of the time; here, that the same native code takes all of them.
    for world in (2, 8):
        tree = [random_array("float32", (world * world, n), n) for n in (4095, 4096, 4097, 4098)]
        _check(op, tree, world)


@EACH_OP
def test_row_10_nothing_to_send(op: str) -> None:
    def f(v: jax.Array) -> Any:
        return CALLS[op]([v[:, :0], v[:0], v[:0, :0], v[:0, 0], v])

    x = random_array("float32", (16, 3))
    shards = np.split(x, 4)
    parts = [[s[:, :0], s[:0], s[:0, :0], s[:0, 0], s] for s in shards]
    expected = [_oracle(op, list(each)) for each in zip(*parts, strict=True)]
    # Four of the leaves would travel in one call, which XLA leaves out.
    assert_same_bits(_run(op, x, 4, f, calls=1), expected)


# Dtypes and numbers.


@pytest.mark.parametrize("reduce", ("sum", "prod"))
@pytest.mark.parametrize("dtype", INTEGERS)
def test_row_16_integers_wrap_around(dtype: str, reduce: str) -> None:
    with jax.enable_x64(True):
        large = np.full((2, 3), np.iinfo(dtype).max // 2 + 37, dtype)
        fold = {"sum": np.add, "prod": np.multiply}[reduce]
        both = _run("all_reduce", large, 2, lambda v: purlin.all_reduce(v, "x", reduce))
        assert_same_bits(both, np.concatenate([fold(large[:1], large[1:])] * 2))
        tall = np.repeat(large, 2, 0)
        f = lambda v: purlin.reduce_scatter(v, "x", reduce, tiled=True)  # noqa: E731
        assert_same_bits(_run("reduce_scatter", tall, 2, f), fold(large, large))
    assert _run("all_reduce", np.full(2, 100, np.int8), 2).tolist() == [-56, -56]


@EACH_OP
def test_row_17_integers_run_natively(op: str) -> None:
    with jax.enable_x64(True):
        for dtype in INTEGERS:
            _check(op, random_array(dtype, (4, 1024)), 2)


@EACH_OP
def test_row_18_complex_numbers(op: str) -> None:
    with jax.enable_x64(True):
        for dtype in ("complex64", "complex128"):
            _check(op, random_array(dtype, (9, 33)), 3)
            y = _run("all_reduce", np.full(2, 1 + 2j, dtype), 2)
            assert y.dtype == dtype and (y == 2 + 4j).all()


def test_row_19_booleans() -> None:
    x = random_array("bool", (16, 5))
    for op in ("all_gather", "all_to_all"):
        assert_same_bits(_run(op, x, 4), _oracle(op, np.split(x, 4)))
    folds = {"or": np.logical_or, "and": np.logical_and, "xor": np.logical_xor}
    for reduce, fold in folds.items():
        total = fold.reduce(np.split(x, 4))
        got = _run("all_reduce", x, 4, lambda v, r=reduce: purlin.all_reduce(v, "x", r))
        assert_same_bits(got, np.concatenate([total] * 4))
        f = lambda v, r=reduce: purlin.reduce_scatter(v, "x", r, tiled=True)  # noqa: E731
        assert_same_bits(_run("reduce_scatter", x, 4, f), total)
    for reduce in ("sum", "prod"):
        for f in (
            lambda v, r=reduce: purlin.all_reduce(v, "x", r),
            lambda v, r=reduce: purlin.reduce_scatter(v, "x", r, tiled=True, backend="lax"),
        ):
            with pytest.raises(TypeError, match=f"a {reduce} of booleans is no boolean; count"):
                sharded(f, mesh(4))(x)
    # As jax.lax does, psum counts.
    counted = _run("all_reduce", x, 4, lambda v: purlin.psum(v, "x"))
    assert_same_bits(counted, np.concatenate([sum(s.astype(np.int32) for s in np.split(x, 4))] * 4))


@EACH_OP
def test_row_22_the_sign_of_zero(op: str) -> None:
    with jax.enable_x64(True):
        tree = {d: np.full((4, 7), -0.0, d) for d in FLOATS}
        reduces = op in ("all_reduce", "reduce_scatter")
        got = _run(op, tree, 2, calls=len(FLOATS) if reduces else None)
    for d, y in got.items():
        assert (y == 0).all() and np.signbit(y).all(), d
    mixed = np.array([[0.0], [-0.0]], np.float32)
    assert not np.signbit(_run("all_reduce", mixed, 2)).any()


@pytest.mark.parametrize("rank", (0, 1, 2))
@pytest.mark.parametrize("reduce", ("max", "min", "sum", "prod"))
def test_row_24_nan_on_any_rank(reduce: str, rank: int) -> None:
    with jax.enable_x64(True):
        for dtype in FLOATS:
            x = np.ones((9, 2), dtype)
            x[3 * rank : 3 * rank + 3, 1] = np.nan
            f = lambda v: purlin.all_reduce(v, "x", reduce)  # noqa: E731
            g = lambda v: purlin.reduce_scatter(v, "x", reduce, tiled=True)  # noqa: E731
            for y in (_run("all_reduce", x, 3, f), _run("reduce_scatter", x, 3, g)):
                assert np.isnan(y[:, 1]).all() and not np.isnan(y[:, 0]).any(), dtype


@pytest.mark.parametrize("regime", ("meet", "packet", "zero_staging"))
def test_row_25_subnormals(regime: str) -> None:
    tiny = {"float32": 1e-40, "bfloat16": 2.0**-133, "float16": 2.0**-24, "float64": 5e-324}
    with jax.enable_x64(True), purlin.policy(regime):
        for dtype, value in tiny.items():
            x = np.full((4, 5), value, dtype)
            expected = (x[:2].astype(np.float64) * 2).astype(dtype)
            assert (expected > 0).all()
            got = _run("reduce_scatter", x, 2)
            assert_same_bits(got, expected)
            assert_same_bits(_run("all_reduce", x, 2), np.concatenate([expected] * 2))


@pytest.mark.parametrize(("regime", "size"), (("meet", 1 << 20), ("packet", 1 << 14)))
def test_row_27_the_same_bits_on_all_ranks_in_all_runs(regime: str, size: int) -> None:
    x = random_array("float32", (4, size))
    expected = np.broadcast_to(summed(np.split(x, 4)), x.shape).view(np.uint32)
    over = NamedSharding(mesh(4), P("x"))
    given, wanted = (jax.device_put(v, over) for v in (x, expected))

    @jax.jit
    def different(v: jax.Array) -> jax.Array:
        total = sharded(CALLS["all_reduce"], mesh(4), check_vma=False)(v)
        return (jax.lax.bitcast_convert_type(total, np.uint32) != wanted).sum()

    with purlin.policy(regime):
        before = purlin.native_regimes().get(("all_reduce", regime), 0)
        assert not any(int(different(given)) for _ in range(100))
        assert purlin.native_regimes()["all_reduce", regime] - before == 400


# Transformations.


@EACH_OP
def test_row_30_gradient_of_a_linear_loss(op: str) -> None:
    x = random_array("float32", (16, 3))
    inner = sharded(CALLS[op], mesh(4), check_vma=False)
    w = random_array("float32", inner(x).shape, 1)
    got = to_numpy(jax.jit(jax.grad(lambda v: (w * inner(v)).sum()))(x))
    each = np.split(w, 4)
    expected = {
        "all_to_all": lambda: np.concatenate(exchanged(each, 0, 0)),
        "all_reduce": lambda: all_reduced(w, 4),
        "all_gather": lambda: summed(each),
        "reduce_scatter": lambda: np.concatenate([w] * 4),
    }[op]()
    assert_same_bits(got, expected)


@VMA
@EACH_OP
@pytest.mark.parametrize("in_axis", (0, 1))
def test_row_32_vmap_of_shard_map(op: str, in_axis: int, check_vma: bool) -> None:
    x = random_array("float32", (16, 5, 3))
    f = CALLS[op]
    out = P() if op == "all_reduce" else P("x")
    inner = sharded(f, mesh(4), out_specs=out, check_vma=check_vma)
    mapped = jax.jit(jax.vmap(inner, in_axes=in_axis))
    stacked = np.moveaxis(x, -1, in_axis)
    got = run_counted(mapped, stacked, op=op, calls=4)
    assert_same_bits(got, np.stack([to_numpy(inner(x[..., i])) for i in range(3)]))


@VMA
@EACH_OP
def test_row_34_gradient_of_a_mean_loss(op: str, check_vma: bool) -> None:
    # Inside, as data-parallel training does, and outside.
    x = random_array("float32", (16, 8))

    def build(c: Fn) -> Fn:
        def loss(v: jax.Array) -> jax.Array:
            return jnp.mean(jnp.sin(c(v)) ** 2)

        def inside(v: jax.Array) -> Any:
            grad = jax.grad(loss)(v)
            return grad, jax.lax.pmean(grad, "x").sum() + v

        outside = sharded(lambda v: loss(v) + 0 * v.sum(1), mesh(4), check_vma=check_vma)
        return lambda v: (
            sharded(inside, mesh(4), check_vma=check_vma)(v),
            jax.grad(lambda u: outside(u).mean())(v),
        )

    assert_like_lax(build, x, op=op)


def test_row_34_the_gradient_is_that_of_one_device() -> None:
    x = random_array("float32", (8, 6))

    def loss(total: jax.Array) -> jax.Array:
        return jnp.sin(total).mean()

    over = sharded(lambda v: loss(purlin.all_reduce(v.sum(0), "x")), mesh(4), out_specs=P())
    got = run_counted(jax.jit(jax.grad(over)), x, op="all_reduce", calls=4)
    alone = jax.grad(lambda v: loss(v.sum(0)))(x)
    np.testing.assert_allclose(got, alone, rtol=1e-5, atol=1e-6)


def test_row_35_no_axis_is_the_identity() -> None:
    x = random_array("float32", (8, 4, 2))
    for f in (
        lambda v: purlin.all_reduce(v, ()),
        lambda v: purlin.all_to_all(v, (), -1, 0, tiled=True),
        lambda v: purlin.all_gather(v, (), axis=-1, tiled=True),
        lambda v: purlin.reduce_scatter(v, (), scatter_dimension=-1, tiled=True),
        lambda v: purlin.psum(v, ()),
        lambda v: purlin.pmean(v, ()),
        lambda v: purlin.pmax(v, ()),
        lambda v: purlin.psum_scatter(v, (), scatter_dimension=-2, tiled=True),
    ):
        assert_same_bits(to_numpy(sharded(f, mesh(4))(x)), x)


@pytest.mark.parametrize("tiled", (True, False))
def test_row_35_negative_axes_count_from_the_end(tiled: bool) -> None:
    calls = {
        "all_to_all": lambda v, a, b: purlin.all_to_all(v, "x", a, b, tiled=tiled),
        "all_gather": lambda v, a, _: purlin.all_gather(v, "x", axis=a, tiled=tiled),
        "reduce_scatter": lambda v, a, _: purlin.reduce_scatter(
            v, "x", scatter_dimension=a, tiled=tiled
        ),
    }
    x = random_array("float32", (16, 4, 4))  # on each rank every axis is of size 4
    for op, call in calls.items():
        # An untiled gather counts in its result, which has an axis more.
        rank = 4 if op == "all_gather" and not tiled else 3
        for a in range(rank):
            for b in range(3) if op == "all_to_all" else (0,):
                below, above = (
                    _run(op, x, 4, lambda v, i=i, j=j, call=call: call(v, i, j))
                    for i, j in ((a - rank, b - 3), (a, b))
                )
                assert_same_bits(below, above)


@pytest.mark.parametrize(
    "call",
    (*CALLS.values(), *(lambda v, n=n: getattr(purlin, n)(v, "x") for n in
                        ("psum", "pmax", "pmin", "pmean", "psum_scatter"))),
)  # fmt: skip
def test_row_37_a_sharded_array_outside_shard_map(call: Fn) -> None:
    x = jax.device_put(np.ones((16, 4), np.float32), NamedSharding(mesh(4), P("x")))
    with pytest.raises(NameError, match=r"'x'.* is not bound|unbound axis name.* x"):
        jax.jit(call)(x)


@EACH_OP
def test_row_37_no_hidden_gather_inside(op: str) -> None:
    over = reordered_2x4()
    x = jax.device_put(random_array("float32", (16, 8, 4)), NamedSharding(over, P("b", None, "a")))
    f = sharded(
        collective_pair(op, "b")[0], over, in_specs=P("b"), out_specs=P("b"), axis_names={"b"},
        check_vma=False,
    )  # fmt: skip
    hlo = f.lower(x).compile().as_text()
    assert native_collectives(hlo) == [] and custom_calls(hlo) == 1, hlo


@EACH_OP
def test_row_38_operands_that_xla_would_lay_out_otherwise(op: str) -> None:
    x = random_array("float32", (4 * 3, 5, 8, 4))  # NHWC and its transposes
    kernel = random_array("float32", (2, 2, 4, 8), 1)

    def convolved(v: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(
            v, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return y.transpose(3, 0, 2, 1)  # [8, 3, 8, 5]

    moved = _run(op, x, 4, lambda v: CALLS[op](v.transpose(2, 0, 3, 1)))  # [8, 3, 4, 5]
    shards = [s.transpose(2, 0, 3, 1) for s in np.split(x, 4)]
    assert_same_bits(moved, _oracle(op, shards))
    back = _run(op, x, 4, lambda v: CALLS[op](v.transpose(2, 0, 3, 1)).transpose(0, 3, 1, 2))
    assert_same_bits(back, moved.transpose(0, 3, 1, 2))
    # The same numbers whether the convolution is in the same program or before it.
    before = to_numpy(sharded(convolved, mesh(4))(x))
    fused = _run(op, x, 4, lambda v: CALLS[op](convolved(v)))
    np.testing.assert_allclose(fused, _oracle(op, np.split(before, 4)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("donate", (True, False))
def test_row_40_two_collectives_of_one_array(donate: bool) -> None:
    x = np.repeat(np.arange(4, dtype=np.float32), 1000)
    over = mesh(4)

    def f(v: jax.Array) -> Any:
        y = purlin.all_reduce(v, "x")
        return y, purlin.all_reduce(y + v, "x")

    inner = jax.shard_map(f, mesh=over, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    program = jax.jit(inner, donate_argnums=(0,) if donate else ())
    for _ in range(20):
        given = jax.device_put(x, NamedSharding(over, P("x")))
        y, z = run_counted(program, given, op="all_reduce", calls=8)
        assert (y == 6).all() and (z == 30).all()


@EACH_OP
def test_row_40_every_collective_twice(op: str) -> None:
    # A result in use while the next call writes, and an operand in use after both.
    x = random_array("int32", (64, 50)) % 1000

    def twice(c: Fn, v: Any) -> Any:
        y = c(v)
        z = c(y - 1) if op != "reduce_scatter" else c(v - 1)
        return y, z, y.sum() + z.sum() + v.sum()

    y, z, s = _run(op, x, 4, lambda v: [u.reshape(-1) for u in twice(CALLS[op], v)], calls=2)
    shards = np.split(x, 4)
    first = _oracle(op, shards)
    base = shards if op == "reduce_scatter" else np.split(first, 4)
    second = _oracle(op, [b - 1 for b in base])
    assert_same_bits([y, z], [first.ravel(), second.ravel()])
    sums = [sum(np.split(v, 4)[r].sum() for v in (first, second, x)) for r in range(4)]
    np.testing.assert_array_equal(s, np.array(sums).astype(np.int32))


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("world", WORLDS)
def test_row_41_ways_that_should_agree(world: int, dtype: str) -> None:
    x = random_array(dtype, (world * world, 129))

    def folded(rows: jax.Array) -> jax.Array:
        total = rows[0].astype(jnp.float32)
        for r in range(1, world):
            total = total + rows[r].astype(jnp.float32)
        return total.astype(rows.dtype)

    def f(v: jax.Array) -> Any:
        summed_ = purlin.all_reduce(v, "x")
        mine = jax.lax.axis_index("x")
        parts = purlin.all_to_all(v, "x", 0, 0, tiled=True)
        scattered = purlin.reduce_scatter(v, "x", tiled=True)
        return {
            "sum": (summed_, folded(purlin.all_gather(v, "x"))),
            "psum": (summed_, purlin.psum(v, "x")),
            "part": (scattered, jax.lax.dynamic_slice_in_dim(summed_, mine, 1)),
            "exchange": (scattered, folded(parts[:, None])),
            "gather": (summed_, purlin.all_gather(scattered, "x", tiled=True)),
        }

    got = to_numpy(sharded(f, mesh(world), check_vma=False)(x))
    for name, (a, b) in got.items():
        assert_same_bits([a], [b]), name
    assert_same_bits(got["sum"][0], all_reduced(x, world))


def test_all_rows_name_a_collective() -> None:
    assert set(CALLS) == set(FOUR_OPS)
