"""Every kind of mesh: more axes, axes left to XLA, abstract ones, explicit ones, nested scopes."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import purlin_jax as purlin
from tests.harness import (
    EACH_OP,
    VMA,
    Fn,
    P,
    assert_like_lax,
    collective_pair,
    custom_calls,
    mesh,
    native_collectives,
    random_array,
    reordered_2x4,
    run_counted,
    sharded,
    to_numpy,
)

X = random_array("float32", (64, 8))
PERMUTED = (5, 2, 7, 0, 1, 6, 3, 4)


def _over_b(c: Fn, over: Any, check_vma: bool = True) -> Fn:
    """c over "b" alone; "a" is left to XLA. The product varies, so one out_specs serves all."""

    def f(v: jax.Array) -> jax.Array:
        return v.sum() + c(v)

    kwargs: dict[str, Any] = {"in_specs": P("b"), "out_specs": P("b"), "axis_names": {"b"}}
    return sharded(f, over, check_vma=check_vma, **kwargs)


@VMA
@EACH_OP
def test_automatic_axes_stay_local(op: str, check_vma: bool) -> None:
    # jax.lax itself gathers over "a" for three of the four.
    over = reordered_2x4()
    along = NamedSharding(over, P("b", None, "a"))
    x = jax.device_put(random_array("float32", (16, 8, 4)), along)

    def build(c: Fn) -> Fn:
        inner = jax.shard_map(
            c, in_specs=P("b"), out_specs=P("b"), axis_names={"b"}, mesh=over, check_vma=check_vma
        )
        return jax.jit(inner, out_shardings=along)

    if op == "all_reduce" and check_vma:
        build = lambda c: jax.jit(  # noqa: E731
            jax.shard_map(c, mesh=over, in_specs=P("b"), out_specs=P(), axis_names={"b"}),
            out_shardings=NamedSharding(over, P(None, None, "a")),
        )
    hlo = build(collective_pair(op, "b")[0]).lower(x).compile().as_text()
    assert native_collectives(hlo) == [] and custom_calls(hlo) == 1, hlo
    assert "f32[4,8,2]" in hlo and "f32[4,8,4]" not in hlo, hlo
    assert_like_lax(build, x, op=op, axis="b", calls=8)


@VMA
@EACH_OP
@pytest.mark.parametrize("spec", (P("b", "a"), P(("b", "a")), P("b"), P()), ids=str)
def test_any_part_of_an_operand_over_an_automatic_axis(op: str, spec: Any, check_vma: bool) -> None:
    # Also the axes that the collective cuts and joins, which XLA must make whole first.
    over = reordered_2x4()
    x = jax.device_put(X, NamedSharding(over, spec))
    assert_like_lax(lambda c: _over_b(c, over, check_vma), x, op=op, axis="b", calls=8)


@EACH_OP
def test_operands_of_several_ranks_and_shardings(op: str) -> None:
    over = reordered_2x4()
    specs = [P("b", "a"), P("b"), P("b", None, "a")]
    tree = [
        jax.device_put(random_array("float32", shape, i), NamedSharding(over, spec))
        for i, (shape, spec) in enumerate(zip([(16, 8), (16, 4), (16, 4, 6)], specs, strict=True))
    ]
    if op == "all_reduce":  # scalars have no axis to cut

        def build(c: Fn) -> Fn:
            f = lambda t: (c([t[0].sum(), *t]), t[0])[0]  # noqa: E731
            return sharded(f, over, in_specs=P("b"), out_specs=P(), axis_names={"b"})

    else:

        def build(c: Fn) -> Fn:
            return sharded(c, over, in_specs=P("b"), out_specs=P("b"), axis_names={"b"})

    assert_like_lax(build, tree, op=op, axis="b", calls=8)


@EACH_OP
def test_gradient_beside_an_automatic_axis(op: str) -> None:
    over = reordered_2x4()
    x = jax.device_put(X, NamedSharding(over, P("b", "a")))

    def build(c: Fn) -> Fn:
        f = _over_b(lambda v: jnp.sin(c(v)), over)
        return jax.jit(jax.grad(lambda v: (f(v) ** 2).sum()))

    assert_like_lax(build, x, op=op, axis="b")


@EACH_OP
@pytest.mark.parametrize("axis", ("a", "c", ("a", "c"), ("c", "a"), ("b", "c", "a")), ids=str)
def test_three_axes_in_any_order(op: str, axis: Any) -> None:
    over = mesh(8, ("a", "b", "c"), (2, 2, 2), PERMUTED)
    spec = P(("c", "a", "b"))

    def build(c: Fn) -> Fn:
        return sharded(lambda v: v.sum() + c(v), over, in_specs=spec, out_specs=spec)

    assert_like_lax(build, X, op=op, axis=axis, calls=8)


@EACH_OP
def test_axes_of_one_device(op: str) -> None:
    over = mesh(4, ("one", "b", "uno"), (1, 4, 1), (2, 0, 3, 1))
    for axis in ("one", ("one", "b"), ("b", "uno")):

        def build(c: Fn) -> Fn:
            return sharded(lambda v: v.sum() + c(v), over)

        assert_like_lax(build, X, op=op, axis=axis, calls=4)


@EACH_OP
def test_two_manual_axes_of_three(op: str) -> None:
    over = mesh(8, ("a", "b", "c"), (2, 2, 2), PERMUTED)
    x = jax.device_put(random_array("float32", (8, 8, 6)), NamedSharding(over, P("a", None, "b")))
    kwargs: dict[str, Any] = {"in_specs": P(("a", "c")), "out_specs": P(("a", "c"))}

    def build(c: Fn) -> Fn:
        return sharded(lambda v: v.sum() + c(v), over, axis_names={"a", "c"}, **kwargs)

    assert_like_lax(build, x, op=op, axis=("c", "a"), calls=8)


@EACH_OP
@pytest.mark.parametrize("axis_type", (AxisType.Auto, AxisType.Explicit), ids=str)
def test_set_mesh(op: str, axis_type: AxisType) -> None:
    over = reordered_2x4(axis_types=(axis_type,) * 2)
    both = P(("a", "b"))

    def build(c: Fn) -> Fn:
        return jax.jit(jax.shard_map(lambda v: v.sum() + c(v), in_specs=both, out_specs=both))

    with jax.set_mesh(over):
        x = jax.device_put(X, NamedSharding(over, both))
        assert_like_lax(build, x, op=op, axis="b", calls=8)


@EACH_OP
def test_explicit_axes_beside_manual_ones(op: str) -> None:
    over = reordered_2x4(axis_types=(AxisType.Explicit,) * 2)
    data = random_array("float32", (16, 8, 4))
    ours, theirs = collective_pair(op, "b")
    kwargs: dict[str, Any] = {
        "in_specs": P("b"),
        "out_specs": P() if op == "all_reduce" else P("b"),
        "axis_names": {"b"},
    }
    with jax.set_mesh(over):
        x = jax.device_put(data, NamedSharding(over, P("b", None, "a")))
        compiled = jax.jit(jax.shard_map(ours, **kwargs)).lower(x).compile()
        hlo = compiled.as_text()
        assert custom_calls(hlo) == 1, hlo
        # jax 0.10 gathers what enters such a shard_map whatever is in it.
        kwargs["out_specs"] = P("b")
        idle = jax.jit(jax.shard_map(lambda v: v + 1, **kwargs)).lower(x).compile().as_text()
        assert len(native_collectives(hlo)) <= len(native_collectives(idle)), hlo
        got = run_counted(compiled, x, op=op, calls=8)
    # jax.lax.psum_scatter fails on explicit axes (0.12), so the reference has automatic ones.
    kwargs["out_specs"] = P() if op == "all_reduce" else P("b")
    expected = to_numpy(sharded(theirs, reordered_2x4(), **kwargs)(data))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@EACH_OP
def test_traced_with_an_abstract_mesh_and_run_on_two(op: str) -> None:
    one = mesh(8, ("a", "b"), (2, 4))
    both = P(("a", "b"))
    with jax.sharding.use_abstract_mesh(one.abstract_mesh):

        def build(c: Fn) -> Fn:
            return jax.jit(jax.shard_map(lambda v: v.sum() + c(v), in_specs=both, out_specs=both))

        for over in (one, reordered_2x4()):
            x = jax.device_put(X, NamedSharding(over, both))
            assert_like_lax(build, x, op=op, axis="b", calls=8)


@VMA
@EACH_OP
def test_abstract_mesh_beside_an_automatic_axis(op: str, check_vma: bool) -> None:
    over = reordered_2x4()
    x = jax.device_put(random_array("float32", (16, 8, 4)), NamedSharding(over, P("b", None, "a")))

    def build(c: Fn) -> Fn:
        return _over_b(c, over.abstract_mesh, check_vma)

    hlo = build(collective_pair(op, "b")[0]).lower(x).compile().as_text()
    assert set(native_collectives(hlo)) <= {"all-reduce"}, hlo  # the sum that is asked for
    assert_like_lax(build, x, op=op, axis="b", calls=8)


@EACH_OP
def test_three_nested_scopes(op: str) -> None:
    over = mesh(8, ("a", "b", "c"), (2, 2, 2), PERMUTED)

    def nest(f: Fn, axis: str) -> Fn:
        return jax.shard_map(f, in_specs=P(axis), out_specs=P(axis), axis_names={axis})

    def build(c: Fn) -> Fn:
        innermost = nest(lambda v: v.sum() + c(v), "c")
        middle = nest(lambda v: innermost(v) * 2, "b")
        kwargs: dict[str, Any] = {"in_specs": P("a"), "out_specs": P("a"), "axis_names": {"a"}}
        return sharded(lambda v: middle(v) + 1, over, **kwargs)

    # Over an outer axis and the innermost at once.
    for axis in ("c", ("a", "c")):
        assert_like_lax(build, X, op=op, axis=axis, calls=8)


def test_an_axis_that_is_left_to_xla_is_not_bound() -> None:
    over = reordered_2x4()
    program = sharded(
        lambda v: purlin.all_reduce(v, "a"), over, in_specs=P("b"), out_specs=P("b"),
        axis_names={"b"},
    )  # fmt: skip
    with pytest.raises(NameError, match=r"axis 'a' is .* jax\.shard_map"):
        program(X)


def test_what_is_partitioned_is_part_of_the_program() -> None:
    # JAX may be told to leave the address of the callback out of the key of its caches.
    over = reordered_2x4()

    def text(reduce: str) -> str:
        def f(v: jax.Array) -> jax.Array:
            return purlin.all_reduce(v, "b", reduce)

        program = sharded(f, over, in_specs=P("b"), out_specs=P(), axis_names={"b"})
        return re.sub(r'backend_config = "\d+"', "", program.lower(X).as_text())

    assert "backend_config" not in text("sum")
    assert text("sum") != text("max")


@pytest.mark.parametrize("check_vma", (True, False))
def test_the_older_partitioner(check_vma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # It ends the process at custom calls, and at all but one of jax.lax's own collectives.
    over = reordered_2x4()
    x = jax.device_put(X, NamedSharding(over, P("b", "a")))
    ours, theirs = (_over_b(c, over, check_vma) for c in collective_pair("all_reduce", "b"))
    expected = to_numpy(theirs(x))
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        with pytest.raises(purlin.FallbackError, match=r"GSPMD .* beside automatic axes \['a'\]"):
            ours(x)
        monkeypatch.delenv("PURLIN_FALLBACK")
        auto = _over_b(collective_pair("all_reduce", "b")[0], over, check_vma)
        got = run_counted(auto, x, op="all_reduce", calls=0)
        all_manual = sharded(lambda v: purlin.all_reduce(v, "a"), over, out_specs=P("b"))
        run_counted(all_manual, X, op="all_reduce", calls=8)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
