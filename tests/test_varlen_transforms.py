"""Derivatives and other transformations of counted collectives equal those of a dense matrix."""

from __future__ import annotations

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import purlin_jax as purlin
from purlin_jax.primitive import transposed
from tests.harness import VMA, Fn, P, assert_same_bits, random_array, sharded, to_numpy
from tests.varlen import (
    capacity_of,
    everything,
    everything_expected,
    exchange,
    feed,
    flat,
    over,
    under,
)
from tests.varlen_dense import LINEAR, dense

RANKS, ROWS = flat(3), 4
ROOM = capacity_of(RANKS, ROWS)
GIVEN = feed(RANKS, "zipf", ROWS)
OTHER = feed(RANKS, "some", ROWS, seed=5)
EACH = pytest.mark.parametrize("name", LINEAR)
BACKENDS = pytest.mark.parametrize("backend", ("purlin", "lax"))


def _argument(name: str, seed: int = 0) -> np.ndarray:
    return random_array("float32", (3, LINEAR[name].rows(ROWS, ROOM), 2), seed)


def _close(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def _loss(f: Fn) -> Fn:
    """A nonlinear function around `f`, in which each element of the result counts for itself."""

    def loss(v: jax.Array) -> jax.Array:
        y = f(v * v)
        return (jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape) * jnp.sin(y)).sum()

    return loss


@BACKENDS
@VMA
@EACH
def test_derivatives(name: str, check_vma: bool, backend: str) -> None:
    linear = LINEAR[name]
    x, along = _argument(name), _argument(name, 1)

    def derive(f: Fn) -> Fn:
        def all_of_them(v: jax.Array, t: jax.Array) -> dict[str, Any]:
            y = f(v)
            ct = jnp.sin(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
            return {
                "gradient": jax.value_and_grad(_loss(f))(v),
                "jvp": jax.jvp(f, (v,), (t,)),
                "second": jax.jvp(jax.grad(_loss(f)), (v,), (t,))[1],
                "transposed": jax.linear_transpose(f, v)(ct)[0],
            }

        return jax.jit(all_of_them)

    with purlin.backend(backend):
        before = purlin.native_calls()
        program = over(RANKS, linear.run, check_vma=check_vma)
        got = to_numpy(derive(lambda v: program(v, GIVEN))(x, along))
        ran = {op for op, n in purlin.native_calls().items() if n > before.get(op, 0)}
    needed = {linear.op, transposed(linear.op)}
    assert not ran if backend == "lax" else needed <= ran
    expected = to_numpy(derive(dense(linear, GIVEN, ROWS))(x, along))
    _close(got, expected)
    assert_same_bits(got["jvp"][1], linear.reference(along, GIVEN))
    if name in ("all_to_all_v", "all_gather_v"):
        sent = np.arange(ROWS) < GIVEN["size"][:, None]
        assert not sent.all() and np.all(got["gradient"][1][~sent] == 0)


@pytest.mark.own_regime
@pytest.mark.parametrize("regime", ("packet", "staged, rounds", "zero_staging, 3 blocks"))
def test_gradients_in_each_regime(regime: str) -> None:
    xs = {name: _argument(name) for name in LINEAR}

    def total(collective: Fn) -> Fn:
        return lambda v: sum(_loss(collective(name))(v[name]) for name in LINEAR)

    programs = {name: over(RANKS, linear.run) for name, linear in LINEAR.items()}
    with under(regime):
        ours = jax.jit(jax.grad(total(lambda name: lambda v: programs[name](v, OTHER))))
        got = to_numpy(ours(xs))
    _close(
        got, to_numpy(jax.jit(jax.grad(total(lambda name: dense(LINEAR[name], OTHER, ROWS))))(xs))
    )


@BACKENDS
@VMA
def test_cotangents_of_rows_that_do_not_exist(check_vma: bool, backend: str) -> None:
    # Behind the received rows a cotangent may hold anything.
    names = ("all_to_all_v", "all_gather_v", "reduce_scatter_v")
    ends = {
        "all_to_all_v": GIVEN["sizes"].sum(0),
        "all_gather_v": np.repeat(GIVEN["size"].sum(), 3),
        "reduce_scatter_v": GIVEN["blocks"][0],
    }
    x = random_array("float32", (3, ROWS, 2))
    cts = {}
    for name in names:
        y = LINEAR[name].reference(x, GIVEN)
        cts[name] = random_array("float32", y.shape, 2)
        behind = np.arange(y.shape[1]) >= ends[name][:, None]
        assert behind.any()
        cts[name][behind] = np.nan

    def f(v: jax.Array, t: Any, ct: Any) -> Any:
        pulls = {n: jax.vjp(lambda u, n=n: LINEAR[n].run(u, t), v)[1] for n in names}
        return {n: pull(ct[n])[0] for n, pull in pulls.items()}

    with purlin.backend(backend):
        got = to_numpy(over(RANKS, f, check_vma=check_vma)(x, GIVEN, cts))
    for name in names:
        back = jax.linear_transpose(dense(LINEAR[name], GIVEN, ROWS), x)
        _close(got[name], np.asarray(back(np.nan_to_num(cts[name]))[0]))


@BACKENDS
@VMA
def test_operands_that_do_not_vary(check_vma: bool, backend: str) -> None:
    # All ranks send the same array, so its gradient counts it once for each.
    x = random_array("float32", (ROWS, 2))

    def f(v: jax.Array, t: Any) -> jax.Array:
        local = jax.tree.map(lambda u: u[0], t)
        parts = [LINEAR[n].run(v, local) for n in ("all_to_all_v", "all_gather_v")]
        return jnp.concatenate(parts)[None]

    def theirs(v: jax.Array) -> jax.Array:
        tiled = jnp.stack([v] * 3)
        parts = [dense(LINEAR[n], GIVEN, ROWS)(tiled) for n in ("all_to_all_v", "all_gather_v")]
        return jnp.concatenate(parts, 1)

    with purlin.backend(backend):
        program = sharded(f, RANKS.mesh, in_specs=(P(), P("x")), check_vma=check_vma)
        got = jax.jit(jax.value_and_grad(_loss(lambda v: program(v, GIVEN))))(x)
    _close(to_numpy(got), to_numpy(jax.jit(jax.value_and_grad(_loss(theirs)))(x)))


@VMA
def test_some_leaves_have_gradients(check_vma: bool) -> None:
    # Six leaves, so two calls; integers and what is not asked for have none.
    sizes = GIVEN["sizes"]
    tree = {f"f{i}": random_array("float32", (3, ROWS, i), i) for i in range(1, 4)}
    rest = {
        "frozen": random_array("float32", (3, ROWS), 8),
        "i": random_array("int8", (3, ROWS, 2), 9),
        "b": random_array("bool", (3, ROWS), 9),
    }

    def f(t: Any, r: Any, n: jax.Array) -> Any:
        out, received = purlin.all_to_all_v({**t, **r}, n, "x", capacity=ROOM)
        return {k: v.astype(jnp.float32) * received.sum() for k, v in out.items()}

    program = over(RANKS, f, check_vma=check_vma)

    def total(t: Any, i: Any, which: Fn) -> jax.Array:
        return sum((y**2).sum() for y in jax.tree.leaves(which(t, {**rest, "i": i})))

    def theirs(t: Any, r: Any) -> Any:
        move = dense(LINEAR["all_to_all_v"], GIVEN, ROWS)
        received = sizes.sum(0).astype(np.float32)
        return {
            k: move(v) * received.reshape(3, *(1 for _ in v.shape[1:])) for k, v in
            {**t, **jax.tree.map(lambda u: u.astype(np.float32), r)}.items()
        }  # fmt: skip

    ours = jax.grad(
        lambda t, i: total(t, i, lambda t, r: program(t, r, sizes)), (0, 1), allow_int=True
    )
    got, of_integers = jax.jit(ours)(tree, rest["i"])
    assert of_integers.dtype == jax.dtypes.float0
    expected = jax.jit(jax.grad(lambda t: total(t, rest["i"], theirs)))(tree)
    _close(to_numpy(got), to_numpy(expected))


@BACKENDS
@VMA
def test_counts_that_are_numbers(check_vma: bool, backend: str) -> None:
    matrix = GIVEN["sizes"]
    numbers = {
        "all_to_all_v": lambda v: purlin.all_to_all_v(v, matrix, "x", capacity=ROOM)[0],
        "all_gather_v": lambda v: purlin.all_gather_v(
            v, GIVEN["size"].tolist(), "x", capacity=3 * ROWS
        )[0],
        "reduce_scatter_v": lambda v: purlin.reduce_scatter_v(
            v, GIVEN["blocks"][0], "x", capacity=ROWS
        )[0],
    }
    x = random_array("float32", (3, ROWS, 2))

    def ours(v: jax.Array) -> jax.Array:
        return jnp.concatenate([f(v) for f in numbers.values()])

    def theirs(v: jax.Array) -> jax.Array:
        return jnp.concatenate([dense(LINEAR[name], GIVEN, ROWS)(v) for name in numbers], 1)

    with purlin.backend(backend):
        got = jax.jit(jax.value_and_grad(_loss(over(RANKS, ours, check_vma=check_vma))))(x)
    _close(to_numpy(got), to_numpy(jax.jit(jax.value_and_grad(_loss(theirs)))(x)))


@pytest.mark.parametrize("wrap", ("plain", "remat"))
@VMA
def test_grad_of_a_scan_whose_counts_change(wrap: str, check_vma: bool) -> None:
    steps = [feed(RANKS, n, ROWS, seed=i) for i, n in enumerate(("zipf", "some", "one huge"))]
    stacked = jax.tree.map(lambda *v: np.stack(v, 1), *steps)

    def body(u: jax.Array, t: Any, collectives: dict[str, Fn], axis: int) -> jax.Array:
        """All four in turn, each result brought back to the rows of its argument."""

        def resized(v: jax.Array, n: int) -> jax.Array:
            times = -(-n // v.shape[axis])
            return jax.lax.slice_in_dim(jnp.concatenate([v] * times, axis), 0, n, axis=axis)

        for name, f in collectives.items():
            y = f(resized(u, LINEAR[name].rows(ROWS, ROOM)), t)
            u = jnp.sin(u + resized(y, ROWS))
        return u

    ours = {name: linear.run for name, linear in LINEAR.items()}
    once = jax.checkpoint(body, static_argnums=(2, 3)) if wrap == "remat" else body

    def f(v: jax.Array, every: Any) -> jax.Array:
        fixed = _Fixed(ours)
        return jax.lax.scan(lambda u, t: (once(u, t, fixed, 0), None), v, every)[0]

    def theirs(v: jax.Array) -> jax.Array:
        for t in steps:
            each = {n: lambda z, t, n=n: dense(LINEAR[n], t, ROWS)(z) for n in LINEAR}
            v = body(v, t, each, 1)
        return v

    x = random_array("float32", (3, ROWS, 2))
    program = over(RANKS, f, check_vma=check_vma)
    got = jax.jit(jax.value_and_grad(_loss(lambda v: program(v, stacked))))(x)
    _close(to_numpy(got), to_numpy(jax.jit(jax.value_and_grad(_loss(theirs)))(x)))


class _Fixed(dict[str, Fn]):
    """A dict that jax.checkpoint takes as a static argument."""

    __hash__ = object.__hash__  # type: ignore[assignment]


@BACKENDS
def test_no_derivative_of_a_maximum(backend: str) -> None:
    def f(v: jax.Array, t: Any) -> jax.Array:
        return purlin.reduce_scatter_v(v, t["blocks"], "x", "max")[0]

    x = random_array("float32", (3, ROWS, 2))
    program = over(RANKS, f)
    with pytest.raises(NotImplementedError, match=r"purlin\.reduce_scatter_v: 'max' has no"):
        jax.grad(lambda v: program(v, GIVEN).sum())(x)


def test_export() -> None:
    exported = jax.export.export(
        everything(RANKS, ROWS), disabled_checks=purlin.export_checks()
    )(GIVEN)  # fmt: skip
    again = jax.jit(jax.export.deserialize(exported.serialize()).call)
    for given in (GIVEN, OTHER):
        put = jax.device_put(given, jax.NamedSharding(RANKS.mesh, P("x")))
        assert_same_bits(to_numpy(again(put)), everything_expected(RANKS, given))


def test_nothing_is_traced_again_for_other_counts() -> None:
    traced = []

    def f(v: jax.Array, n: jax.Array) -> jax.Array:
        traced.append(1)
        return purlin.all_to_all_v(v, n, "x", capacity=ROOM)[0]

    program, x = over(RANKS, f), random_array("float32", (3, ROWS, 2))
    for given in (GIVEN, OTHER):
        got = np.asarray(program(x, given["sizes"]))
        assert_same_bits(got, exchange(x, given["sizes"], ROOM))
    assert len(traced) == 1
