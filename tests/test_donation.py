"""all_reduce works in place: in the memory of a donated argument, and never in somebody else's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import purlin_jax as purlin
from tests.harness import (
    Fn,
    P,
    all_reduced,
    assert_same_bits,
    custom_calls,
    mesh,
    random_array,
    reordered_2x4,
    run_counted,
    sharded,
)

WORLD = 4
REGIMES = pytest.mark.parametrize(
    "regime", ("meet", "packet", "staged", "zero_staging", "composed", "zero_staging_composed")
)
BLOCKS = pytest.mark.parametrize("blocks", (1, 3))
# Sizes around words, cache lines and shares of blocks; element sizes from 1 to 8 bytes.
DTYPES = ("int8", "bool", "float8_e4m3fn", "bfloat16", "int16", "float32", "uint32", "complex64")
# None is empty: jaxlib 0.11.2 crashes when it compiles a sharded program that takes an empty array
# beside others, whatever is done with them.
SIZES = (1, 3, 33, 130, 4099)


def _sum(v: Any, **kwargs: Any) -> Any:
    return purlin.all_reduce(v, "x", **kwargs)


def _on(x: Any, world: int = WORLD) -> Any:
    return jax.device_put(x, NamedSharding(mesh(world), P("x")))


def _program(f: Fn, regime: str, blocks: int, x: Any, **kwargs: Any) -> Any:
    """f over a flat mesh, compiled for x under a policy."""
    program = jax.shard_map(f, mesh=mesh(WORLD), in_specs=P("x"), out_specs=P("x"), check_vma=False)
    with purlin.policy(regime, blocks=blocks):
        return jax.jit(program, **kwargs).lower(x).compile()


def _aliased(compiled: Any) -> int:
    """Results of purlin calls that lie where an operand lay."""
    calls = [line for line in compiled.as_text().splitlines() if purlin.domain.TARGET in line]
    return sum(line.count(", {})") for line in calls if "output_to_operand_aliasing" in line)


@REGIMES
@BLOCKS
def test_values_of_a_donated_argument(regime: str, blocks: int) -> None:
    x = random_array("float32", (WORLD, 3001))
    given = _on(x)
    compiled = _program(_sum, regime, blocks, given, donate_argnums=0)
    assert _aliased(compiled) == (regime != "zero_staging")
    got = run_counted(compiled, given, op="all_reduce", calls=WORLD)
    assert given.is_deleted()
    assert_same_bits(got, all_reduced(x, WORLD))


@REGIMES
@BLOCKS
def test_an_argument_that_is_not_donated_keeps_its_values(regime: str, blocks: int) -> None:
    x = random_array("float32", (WORLD, 3001))
    given = _on(x)
    compiled = _program(_sum, regime, blocks, given)
    for _ in range(3):
        got = run_counted(compiled, given, op="all_reduce", calls=WORLD)
        assert_same_bits(got, all_reduced(x, WORLD))
        assert_same_bits(np.asarray(given), x)


@REGIMES
@pytest.mark.parametrize("donate", (True, False))
def test_an_operand_that_is_needed_later(regime: str, donate: bool) -> None:
    # Before, beside and after the collective, and twice by collectives that write over it.
    def f(v: jax.Array) -> Any:
        u = v * 2
        s = _sum(u)
        return {"v": v, "u": u, "s": s, "again": _sum(u), "mixed": u - s, "of sum": _sum(s)}

    x = random_array("float32", (WORLD, 3001))
    compiled = _program(f, regime, 0, _on(x), donate_argnums=(0,) if donate else ())
    assert custom_calls(compiled.as_text()) in (2, 3)  # equal calls may be one
    s = all_reduced(x * 2, WORLD)
    got = {k: np.asarray(y) for k, y in compiled(_on(x)).items()}
    expected = {"v": x, "u": x * 2, "s": s, "again": s, "mixed": x * 2 - s}
    expected["of sum"] = all_reduced(s, WORLD)
    assert_same_bits(got, expected)


@REGIMES
@pytest.mark.parametrize("donate", (True, False))
def test_one_array_as_two_operands(regime: str, donate: bool) -> None:
    x = random_array("float32", (WORLD, 3001))
    for f in (
        lambda v: _sum([v, v, v]),
        lambda v: _sum([v, v + 0, jnp.negative(jnp.negative(v))]),  # XLA may find them equal
    ):
        compiled = _program(f, regime, 0, _on(x), donate_argnums=(0,) if donate else ())
        got = run_counted(compiled, _on(x), op="all_reduce", calls=WORLD)
        assert_same_bits(got, [all_reduced(x, WORLD)] * 3)


@REGIMES
@BLOCKS
def test_in_a_scan(regime: str, blocks: int) -> None:
    # The carry lives in one buffer, which the collective may take; the inputs it may not.
    def f(v: jax.Array) -> Any:
        def step(carry: jax.Array, row: jax.Array) -> Any:
            total = _sum(carry)
            return total // 2 + _sum(row), (total, row)

        rows = jnp.stack([v + i for i in range(5)])
        return jax.lax.scan(step, v, rows), rows

    x = random_array("int32", (WORLD, 257)) % 1000
    compiled = _program(f, regime, blocks, _on(x), donate_argnums=0)
    (carry, (totals, seen)), rows = jax.tree.map(np.asarray, compiled(_on(x)))
    expected = x
    for i in range(5):
        total = all_reduced(expected, WORLD)
        # Ranks stack their rows along the first axis: [rank * 5 + step, 257] after out_specs.
        np.testing.assert_array_equal(totals.reshape(WORLD, 5, 257)[:, i], total)
        expected = total // 2 + all_reduced(x + i, WORLD)
    np.testing.assert_array_equal(carry, expected)
    np.testing.assert_array_equal(seen, rows)


@pytest.mark.parametrize(
    "regime", ("meet", "packet", "staged", "composed", "zero_staging_composed")
)
@BLOCKS
@pytest.mark.parametrize("donate", (True, False))
def test_trees_of_dtypes_of_all_sizes(regime: str, blocks: int, donate: bool) -> None:
    tree = {k: [random_array(k, (WORLD, size), size) for size in SIZES] for k in DTYPES}

    def f(t: Any) -> Any:
        return {k: _sum(v, op="or" if k == "bool" else "sum") for k, v in t.items()}

    given = jax.tree.map(_on, tree)
    compiled = _program(f, regime, blocks, given, donate_argnums=(0,) if donate else ())
    got = jax.tree.map(np.asarray, compiled(given))
    expected = {k: [all_reduced(v, WORLD) for v in leaves] for k, leaves in tree.items()}
    assert_same_bits(got, expected)
    if not donate:
        assert_same_bits(jax.tree.map(np.asarray, given), tree)


def test_donated_memory_of_numpy_is_left_alone() -> None:
    # On the CPU, JAX may take numpy's memory for its own without a copy.
    x = random_array("float32", (WORLD, 1 << 16))
    before = x.copy()
    compiled = _program(_sum, "meet", 0, _on(x), donate_argnums=0)
    for given in (_on(x), jax.device_put(x, NamedSharding(mesh(WORLD), P("x")), may_alias=True)):
        assert_same_bits(np.asarray(compiled(given)), all_reduced(before, WORLD))
    assert_same_bits(x, before)


def test_groups_and_types_in_place() -> None:
    x = random_array("float32", (8, 600))
    over = reordered_2x4()
    groups = [[0, 3], [2, 1]]

    def grouped(v: jax.Array) -> jax.Array:
        return purlin.all_reduce(v, "b", axis_index_groups=groups)

    def typed(v: jax.Array) -> jax.Array:  # invariant over b under check_vma
        return purlin.all_reduce(v, "b")

    rows = x.reshape(2, 4, 600)
    paired = np.stack(
        [np.stack([r[0] + r[3], r[2] + r[1], r[2] + r[1], r[0] + r[3]]) for r in rows]
    ).reshape(8, 600)
    whole = np.stack([((r[0] + r[1]) + r[2]) + r[3] for r in rows])
    for f, out, expected in ((grouped, P(("a", "b")), paired), (typed, P("a"), whole)):
        for donate in ((), (0,)):
            inner = jax.shard_map(f, mesh=over, in_specs=P(("a", "b")), out_specs=out)
            program = jax.jit(inner, donate_argnums=donate)
            given = jax.device_put(x, NamedSharding(over, P(("a", "b"))))
            compiled = program.lower(given).compile()
            assert _aliased(compiled) == 1
            assert_same_bits(run_counted(compiled, given, op="all_reduce", calls=8), expected)


def test_under_grad() -> None:
    # What the backward pass needs of the forward pass must survive it.
    def loss(v: jax.Array) -> jax.Array:
        u = jnp.sin(v)
        return (_sum(u) * u * v).sum()

    x = random_array("float32", (WORLD, 64))
    ours = sharded(jax.grad(loss), mesh(WORLD), check_vma=False)
    u = np.sin(x.astype(np.float64))
    # Rank r's loss is the sum of s * u_r * v_r, and s, the sum of all u, carries all losses back.
    expected = np.cos(x) * (u * x).sum(0) + u.sum(0) * (np.cos(x) * x + u)
    np.testing.assert_allclose(np.asarray(ours(x)), expected, rtol=1e-4, atol=1e-5)


MIB16 = jax.ShapeDtypeStruct((WORLD, 4 << 20), "float32")


def test_a_donated_sum_holds_no_second_buffer() -> None:
    given = jax.ShapeDtypeStruct(
        MIB16.shape, MIB16.dtype, sharding=NamedSharding(mesh(WORLD), P("x"))
    )
    size = 16 << 20
    used = _program(_sum, "meet", 0, given, donate_argnums=0).memory_analysis()
    assert used.argument_size_in_bytes == used.output_size_in_bytes == size
    assert used.alias_size_in_bytes == size
    assert used.temp_size_in_bytes < 1 << 16
    # What it would be otherwise: the same program in a regime that needs its operand to the end.
    apart = _program(_sum, "zero_staging", 0, given, donate_argnums=0).memory_analysis()
    assert apart.alias_size_in_bytes == size
    assert apart.temp_size_in_bytes >= size
    # A sum of something computed needs no second buffer either.
    between = _program(lambda v: _sum(jnp.sin(v)) * 3, "meet", 0, given).memory_analysis()
    assert between.temp_size_in_bytes < 1 << 16
