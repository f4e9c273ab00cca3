"""Ways to compile and run programs: jit and its caches, donation, AOT, and every kind of mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

import purlin_jax as purlin
from tests.harness import (
    EACH_OP,
    Fn,
    P,
    assert_like_lax,
    collective_pair,
    custom_calls,
    kept,
    mesh,
    random_array,
    reordered_2x4,
    run_counted,
    sharded,
)

X = random_array("float32", (64, 8))
ALL = P(("a", "b"))


def _around(c: Fn) -> Fn:
    """A product that varies over the mesh, so that one out_specs serves both collectives."""
    return lambda v: v * kept(c)(v)


def _same(build: Callable[[Fn], Fn], *args: Any, op: str) -> None:
    """build(function around the collective over "b") on args is as with jax.lax."""
    assert_like_lax(lambda c: build(_around(c)), *args, op=op, axis="b", calls=8)


@EACH_OP
@pytest.mark.parametrize("check_vma", (True, False))
def test_partial_manual_shard_map(op: str, check_vma: bool) -> None:
    def build(c: Fn) -> Fn:
        kwargs: dict[str, Any] = {"in_specs": P("b"), "out_specs": P("b"), "axis_names": {"b"}}
        return sharded(c, reordered_2x4(), check_vma=check_vma, **kwargs)

    _same(build, X, op=op)


@EACH_OP
def test_partial_manual_shard_map_on_data_sharded_over_the_automatic_axis(op: str) -> None:
    over = reordered_2x4()

    def build(c: Fn) -> Fn:
        return sharded(c, over, in_specs=P("b"), out_specs=P("b"), axis_names={"b"})

    _same(build, jax.device_put(X, NamedSharding(over, P("b", "a"))), op=op)


@EACH_OP
def test_nested_shard_map(op: str) -> None:
    def build(c: Fn) -> Fn:
        inner = jax.shard_map(c, in_specs=P("b"), out_specs=P("b"), axis_names={"b"})
        kwargs: dict[str, Any] = {"in_specs": P("a"), "out_specs": P("a"), "axis_names": {"a"}}
        return sharded(lambda v: inner(v) + 1, reordered_2x4(), **kwargs)

    _same(build, X, op=op)


@EACH_OP
def test_collectives_in_both_of_two_nested_shard_maps(op: str) -> None:
    def build(over_b: Fn, over_a: Fn) -> Fn:
        inner = jax.shard_map(over_b, in_specs=P("b"), out_specs=P("b"), axis_names={"b"})
        kwargs: dict[str, Any] = {"in_specs": P("a"), "out_specs": P("a"), "axis_names": {"a"}}
        return sharded(lambda v: over_a(inner(v) * v), reordered_2x4(), **kwargs)

    pairs = (collective_pair("all_to_all", "b"), collective_pair(op, "a"))
    ours, theirs = (
        build(kept(b), lambda v, a=a: v * kept(a)(v)) for b, a in zip(*pairs, strict=True)
    )
    got = run_counted(ours, X, op=op, calls=16 if op == "all_to_all" else 8)
    np.testing.assert_allclose(got, np.asarray(theirs(X)), rtol=1e-5)


@EACH_OP
def test_abstract_mesh(op: str) -> None:
    over = reordered_2x4()

    def build(c: Fn) -> Fn:
        return jax.jit(jax.shard_map(c, mesh=over.abstract_mesh, in_specs=ALL, out_specs=ALL))

    _same(build, jax.device_put(X, NamedSharding(over, ALL)), op=op)


@EACH_OP
def test_set_mesh_with_explicit_axes(op: str) -> None:
    over = reordered_2x4(axis_types=(AxisType.Explicit,) * 2)

    def build(c: Fn) -> Fn:
        return jax.jit(jax.shard_map(c, out_specs=ALL))

    with jax.set_mesh(over):
        _same(build, jax.device_put(X, NamedSharding(over, ALL)), op=op)


@EACH_OP
def test_one_program_on_two_meshes(op: str) -> None:
    # The same abstract mesh over devices in another order: ranks follow the mesh.
    def build(over: Mesh) -> Callable[[Fn], Fn]:
        return lambda c: sharded(c, over)

    _same(build(reordered_2x4()), X, op=op)
    _same(build(mesh(8, ("a", "b"), (2, 4))), X, op=op)
    _same(build(mesh(8, ("b", "a"), (4, 2), range(7, -1, -1))), X, op=op)


@EACH_OP
def test_ahead_of_time(op: str) -> None:
    def build(c: Fn) -> Fn:
        shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
        return sharded(c, reordered_2x4()).lower(shape).compile()

    _same(build, X, op=op)


@EACH_OP
def test_eager_shard_map(op: str) -> None:
    def build(c: Fn) -> Fn:
        return jax.shard_map(c, mesh=reordered_2x4(), in_specs=ALL, out_specs=ALL)

    _same(build, X, op=op)


@EACH_OP
def test_donated_input(op: str) -> None:
    over = reordered_2x4()
    ours, theirs = (_around(c) for c in collective_pair(op, "b"))
    inner = jax.shard_map(ours, mesh=over, in_specs=ALL, out_specs=ALL)
    x = jax.device_put(X, NamedSharding(over, ALL))
    got = jax.jit(inner, donate_argnums=0)(x)
    assert x.is_deleted()
    np.testing.assert_allclose(np.asarray(got), np.asarray(sharded(theirs, over)(X)), rtol=1e-5)


@EACH_OP
def test_second_call_is_cached(op: str) -> None:
    traces = []
    ours = _around(collective_pair(op, "b")[0])

    def f(v: jax.Array) -> jax.Array:
        traces.append(v.shape)
        return ours(v)

    program = sharded(f, reordered_2x4())
    first = run_counted(program, X, op=op, calls=8)
    second = run_counted(program, X * 2, op=op, calls=8)
    assert len(traces) == 1
    assert not np.array_equal(first, second)


def test_equal_calls_in_jitted_functions() -> None:
    # Both bind sites have the same parameters and lie in one cached jaxpr; both must run.
    exchange = jax.jit(lambda v: purlin.all_to_all(v, "x", 0, 0, tiled=True))
    program = sharded(lambda v: exchange(exchange(v) + 1), mesh(8))
    assert custom_calls(program.lower(X).compile().as_text()) == 2
    np.testing.assert_array_equal(run_counted(program, X, op="all_to_all", calls=16), X + 1)


def test_result_stays_on_the_devices_it_was_made_on() -> None:
    over = mesh(4)
    y = sharded(lambda v: purlin.all_to_all(v, "x", 1, 0, tiled=True), over)(jnp.asarray(X))
    assert y.sharding.is_equivalent_to(NamedSharding(over, P("x")), 2)
