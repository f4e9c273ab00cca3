"""Where purlin cannot run, jax.lax does, or a sentence says why not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purlin_jax as purlin
from purlin_jax import _native
from purlin_jax.backend import refusal
from tests.harness import (
    LATE_REASON,
    Fn,
    P,
    assert_same_bits,
    mesh,
    random_array,
    refuse_late,
    run_counted,
    sharded,
)

X = random_array("float32", (16, 8))
EACH_OP = pytest.mark.parametrize("op", ("all_to_all", "all_reduce"))


def _call(op: str, axis: str = "x", **kwargs: str) -> Fn:
    if op == "all_reduce":
        return lambda v: v * purlin.all_reduce(v, axis, **kwargs)
    return lambda v: v * purlin.all_to_all(v, axis, 1, 1, tiled=True, **kwargs)


@pytest.mark.parametrize("dtype", ("int2", "uint2", "int4", "uint4", "float4_e2m1fn"))
def test_dtypes_below_a_byte_are_refused(dtype: str) -> None:
    reason = refusal("", [jax.ShapeDtypeStruct((4,), dtype)], 8)
    assert reason == f"dtype {dtype} has fewer than 8 bits"


@pytest.mark.parametrize(
    "dtype", ("bool", "int8", "uint16", "int64", "uint64", "bfloat16", "float64", "complex128")
)
def test_dtypes_of_whole_bytes_are_not_refused(dtype: str) -> None:
    with jax.enable_x64(True):
        assert refusal("", [jax.ShapeDtypeStruct((4,), dtype)], 8) is None


def test_refusals_of_reductions_and_worlds() -> None:
    aval = jax.ShapeDtypeStruct((4,), "float32")
    assert refusal("sum", [aval], _native.max_ranks) is None
    assert "ranks are more than" in refusal("sum", [aval], _native.max_ranks + 1)
    scale = jax.ShapeDtypeStruct((4,), "float8_e8m0fnu")
    assert refusal("max", [aval, scale], 8) == "purlin has no max of float8_e8m0fnu"


def test_keys_are_not_plain_data() -> None:
    keys = jax.random.split(jax.random.key(0), 16)
    program = sharded(lambda v: purlin.all_to_all(v, "x", 0, 0, tiled=True), mesh(4))
    with pytest.raises(purlin.FallbackError, match="is not plain data"):
        program(keys)


@pytest.mark.parametrize("check_vma", (True, False))
@EACH_OP
def test_what_lowering_refuses_goes_to_jax_lax(
    op: str, check_vma: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The only reason that is known no earlier than in lowering.
    expected = run_counted(
        sharded(_call(op, backend="lax"), mesh(4), check_vma=check_vma), X, op=op, calls=0
    )
    refuse_late(monkeypatch)
    with pytest.raises(purlin.FallbackError, match=LATE_REASON):
        sharded(_call(op), mesh(4), check_vma=check_vma)(X)
    monkeypatch.delenv("PURLIN_FALLBACK")
    with pytest.raises(purlin.FallbackError, match=LATE_REASON):
        sharded(_call(op, backend="purlin"), mesh(4), check_vma=check_vma)(X)
    auto = sharded(_call(op), mesh(4), check_vma=check_vma)
    assert_same_bits(run_counted(auto, X, op=op, calls=0), expected)


def test_what_lowering_refuses_with_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_late(monkeypatch)
    monkeypatch.delenv("PURLIN_FALLBACK")
    groups = [[0, 3], [2, 1]]

    def f(v: jax.Array) -> jax.Array:
        return purlin.all_to_all(v, "x", 1, 0, axis_index_groups=groups, tiled=True)

    def theirs(v: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(v, "x", 1, 0, axis_index_groups=groups, tiled=True)

    got = run_counted(sharded(f, mesh(4)), X, op="all_to_all", calls=0)
    assert_same_bits(got, np.asarray(sharded(theirs, mesh(4))(X)))


@EACH_OP
def test_strict_mode_and_backends(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = jnp.ones((16, 8), jnp.int4)
    for kwargs in ({}, {"backend": "auto"}, {"backend": "purlin"}):
        with pytest.raises(purlin.FallbackError, match="int4"):
            sharded(_call(op, **kwargs), mesh(4))(x)
    run_counted(sharded(_call(op, backend="lax"), mesh(4)), x, op=op, calls=0)
    monkeypatch.delenv("PURLIN_FALLBACK")
    with pytest.raises(purlin.FallbackError), purlin.backend("purlin"):
        sharded(_call(op), mesh(4))(x)
    run_counted(sharded(_call(op), mesh(4)), x, op=op, calls=0)
    run_counted(sharded(_call(op), mesh(4)), np.ones((16, 8), np.int32), op=op, calls=4)


def test_invariant_result_of_a_fallback() -> None:
    def f(v: jax.Array) -> jax.Array:
        return purlin.all_reduce(v, "x", backend="lax")

    got = run_counted(sharded(f, mesh(4), out_specs=P()), X, op="all_reduce", calls=0)
    np.testing.assert_allclose(got, X.reshape(4, 4, 8).sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", ("max", "min", "prod", "and", "xor"))
@pytest.mark.parametrize("groups", (None, [[2, 0], [1, 3]]))
def test_reductions_that_jax_lax_does_not_scatter(op: str, groups: list[list[int]] | None) -> None:
    def program(backend: str) -> Fn:
        def f(v: jax.Array) -> jax.Array:
            return purlin.reduce_scatter(
                v, "x", op, axis_index_groups=groups, tiled=True, backend=backend
            )

        return sharded(f, mesh(4), check_vma=False)

    x = random_array("int32", (16, 5))
    ours = run_counted(program("purlin"), x, op="reduce_scatter", calls=4)
    assert_same_bits(run_counted(program("lax"), x, op="reduce_scatter", calls=0), ours)
