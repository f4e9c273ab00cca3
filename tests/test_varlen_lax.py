"""What goes to jax.lax gives the same values as purlin does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import purlin_jax as purlin
from tests.harness import P, assert_same_bits, random_array, reordered_2x4, sharded
from tests.varlen import (
    CASES,
    everything,
    everything_expected,
    exchange,
    feed,
    flat,
    over,
    patterns,
    run_native,
)


@pytest.mark.parametrize("case", ("flat", "groups", "axes b, a"))
def test_jax_lax_gives_the_same(case: str) -> None:
    ranks = flat(3) if case == "flat" else CASES[case]()
    with purlin.backend("lax"):
        program = everything(ranks, 16)
        for name in patterns(ranks.world, 16):
            given = feed(ranks, name, 16)
            got = run_native(program, given, calls={})
            assert_same_bits(got, everything_expected(ranks, given))


@pytest.fixture
def loose(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax.lax may take over."""
    monkeypatch.delenv("PURLIN_FALLBACK")


def _exchange(v: jax.Array, n: jax.Array) -> jax.Array:
    return purlin.all_to_all_v(v, n, "x", capacity=8)[0]


SIZES = np.array([[2, 1, 1], [0, 3, 1], [1, 1, 1]], np.int32)


@pytest.mark.usefixtures("loose")
@pytest.mark.parametrize("what", ("int4", "keys"))
def test_elements_that_purlin_does_not_move(what: str) -> None:
    program = over(flat(3), _exchange)
    if what == "int4":
        x = random_array("int8", (3, 6, 2)) % 8
        got = np.asarray(run_native(program, x.astype(jnp.int4), SIZES, calls={})).astype(np.int8)
    else:
        keys = jax.random.split(jax.random.key(0), (3, 6))
        x = np.asarray(jax.random.key_data(keys))
        got = np.asarray(jax.random.key_data(program(keys, SIZES)))
    assert_same_bits(got, exchange(x, SIZES, 8))


@pytest.mark.usefixtures("loose")
def test_axes_that_are_left_to_xla() -> None:
    grid = reordered_2x4()
    x, sizes = random_array("float32", (4, 8, 6)), random_array("uint8", (4, 4)) % 3
    sizes = sizes.astype(np.int32)

    def f(v: jax.Array, n: jax.Array) -> jax.Array:
        return purlin.all_to_all_v(v[0], n[0], "b", capacity=8)[0][None]

    program = sharded(f, grid, in_specs=(P("b"), P("b")), out_specs=P("b"), axis_names={"b"})
    split = jax.device_put(x, jax.NamedSharding(grid, P("b", None, "a")))
    assert_same_bits(run_native(program, split, sizes, calls={}), exchange(x, sizes, 8))
    why = {row.reason for row in purlin.explain(program, split, sizes)}
    assert why == {"counts are not split over automatic axes ['a']"}


def test_symbolic_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    def export() -> str:
        (b,) = jax.export.symbolic_shape("b")
        x, n = jax.ShapeDtypeStruct((3, 6, b), jnp.float32), jax.ShapeDtypeStruct((3, 3), jnp.int32)
        return jax.export.export(over(flat(3), _exchange))(x, n).mlir_module()

    with pytest.raises(purlin.FallbackError, match=r"shape \(6, b\) is symbolic"):
        export()
    monkeypatch.delenv("PURLIN_FALLBACK")
    # JAX itself fails to run such programs with a shard_map and a jnp.where in them (0.10).
    assert "stablehlo.all_gather" in export()


@pytest.mark.usefixtures("loose")
def test_gradient_of_rows_that_go_to_several_ranks() -> None:
    """Where jax.lax takes over in lowering, as for a mesh that is automatic in part."""
    devices = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))

    def local(v: jax.Array) -> jax.Array:
        rank = jax.lax.axis_index("x")
        two = jnp.full(2, 2, jnp.int32)
        starts = jnp.zeros(2, jnp.int32)  # both get rows 0 and 1
        out = jnp.zeros((4,), v.dtype)
        return purlin.ragged_all_to_all(
            v, out, starts, two, jnp.full(2, 2 * rank, jnp.int32), two, axis_name="x"
        )

    mapped = jax.shard_map(
        local, mesh=devices, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=False
    )
    weights = jnp.arange(1.0, 9.0)
    found = jax.jit(jax.grad(lambda v: (mapped(v) * weights).sum()))(jnp.ones(6))
    np.testing.assert_array_equal(found, [6, 8, 0, 10, 12, 0])
