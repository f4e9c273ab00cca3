"""The names of jax.lax: the same signatures, and the same values."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purlin_jax as purlin
from purlin_jax import environment
from tests.harness import mesh, native_collectives, sharded, to_numpy

NAMES = ("psum", "pmax", "pmin", "pmean", "psum_scatter", "all_gather", "all_to_all")


@pytest.mark.parametrize("name", NAMES)
def test_signature(name: str) -> None:
    """That of the installed jax.lax, and behind it what only purlin knows."""
    ours = inspect.signature(getattr(purlin, name)).parameters
    theirs = inspect.signature(getattr(jax.lax, name)).parameters
    assert list(ours) == [*theirs, "backend", "policy"]
    for key, parameter in theirs.items():
        assert (ours[key].default, ours[key].kind) == (parameter.default, parameter.kind), key


CASES: dict[str, Any] = {
    "psum": lambda lib, v: lib.psum(v, "x"),
    "psum of booleans": lambda lib, v: lib.psum(v > 0, "x"),
    "psum of a constant": lambda lib, v: v * lib.psum(1, "x"),
    "psum of a tree": lambda lib, v: lib.psum({"a": v, "b": (v > 0, v[0].astype(int))}, "x"),
    "psum of a tree with numbers": lambda lib, v: v * lib.psum({"a": v, "n": 1}, "x")["n"],
    "psum of arrays and numbers": lambda lib, v: sum(lib.psum((v.sum(), 1, 2.5), "x")) + v,
    "psum in groups": lambda lib, v: lib.psum(v, "x", axis_index_groups=[[0, 3], [1, 2]]),
    "pmax": lambda lib, v: lib.pmax(v, "x"),
    "pmin of integers": lambda lib, v: lib.pmin((v * 10).astype(int), "x"),
    "pmean": lambda lib, v: lib.pmean(v, "x"),
    "pmax of booleans": lambda lib, v: lib.pmax((v > 2, v), "x"),
    "pmin of booleans": lambda lib, v: lib.pmin(v > -2, "x"),
    "psum_scatter": lambda lib, v: lib.psum_scatter(v, "x", scatter_dimension=1, tiled=True),
    "psum_scatter untiled": lambda lib, v: lib.psum_scatter(v[:4, :2], "x"),
    "all_gather": lambda lib, v: lib.all_gather(v, "x", axis=1, tiled=True),
    "all_gather untiled": lambda lib, v: lib.all_gather(v, "x", axis=-1),
    "all_gather in groups": lambda lib, v: lib.all_gather(
        v, "x", axis_index_groups=[[3, 1], [0, 2]]
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_values(case: str) -> None:
    x = jnp.round(jax.random.normal(jax.random.key(0), (16, 8)) * 4) / 4  # sums are exact
    ours, theirs = (
        sharded(lambda v, lib=lib: CASES[case](lib, v), mesh(4), check_vma=False)
        for lib in (purlin, jax.lax)
    )
    assert native_collectives(ours.lower(x).compile().as_text()) == []
    a, b = to_numpy(ours(x)), to_numpy(theirs(x))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert p.dtype == q.dtype
        np.testing.assert_array_equal(p, q)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("case", ["psum", "psum_scatter", "all_gather", "all_gather untiled"])
def test_gradients(case: str, check_vma: bool) -> None:
    x = jax.random.normal(jax.random.key(0), (16, 8))

    def grad(lib: Any) -> np.ndarray:
        f = sharded(lambda v: jnp.sin(CASES[case](lib, v)) + 0 * v.sum(), mesh(4),
                    check_vma=check_vma)  # fmt: skip
        return np.asarray(jax.grad(lambda v: (f(v) ** 2).sum())(x))

    np.testing.assert_allclose(grad(purlin), grad(jax.lax), rtol=1e-5, atol=1e-5)


def test_a_maximum_has_no_derivative() -> None:
    f = sharded(lambda v: purlin.pmax(v, "x"), mesh(2), check_vma=False)
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(lambda v: f(v).sum())(jnp.ones(4))


WEAK = {
    "psum": lambda lib, v: lib.psum(v, "x"),
    "pmax": lambda lib, v: lib.pmax(v, "x"),
    "pmean": lambda lib, v: lib.pmean(v, "x"),
    "psum_scatter": lambda lib, v: lib.psum_scatter(jnp.broadcast_to(v, (4,)), "x", tiled=True),
    "all_gather": lambda lib, v: lib.all_gather(v, "x")[0],
    "ppermute": lambda lib, v: lib.ppermute(v, "x", [(i, (i + 1) % 4) for i in range(4)]),
    "all_to_all": lambda lib, v: lib.all_to_all(jnp.broadcast_to(v, (4,)), "x", 0, 0, tiled=True)[
        0
    ],
}


@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("case", WEAK)
def test_weak_types(case: str, check_vma: bool) -> None:
    """What comes of a Python number gives way to bfloat16 where that of jax.lax does."""

    def dtypes(lib: Any) -> Any:
        def f(v: jax.Array) -> jax.Array:
            weak = WEAK[case](lib, jax.lax.axis_index("x") * 0.5)
            return jnp.ravel(weak * jnp.ones(1, jnp.bfloat16) + 0 * v[0])

        out = sharded(f, mesh(4), check_vma=check_vma)
        return out(jnp.ones((16, 8), jnp.bfloat16)).dtype

    assert dtypes(purlin) == dtypes(jax.lax)


@pytest.mark.parametrize("name", ("pmax", "psum"))
def test_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of random numbers go to jax.lax, whatever that makes of them."""
    monkeypatch.delenv("PURLIN_FALLBACK")
    keys = jax.random.split(jax.random.key(0), 4)

    def outcome(lib: Any) -> Any:
        try:
            reduced = sharded(lambda k: getattr(lib, name)(k, "x"), mesh(4), check_vma=False)
            return jax.random.key_data(reduced(keys)).tolist()
        except Exception as error:
            return type(error)

    assert outcome(purlin) == outcome(jax.lax)


def test_groups_of_different_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax.lax takes them in reductions."""
    x = jnp.arange(16.0).reshape(8, 2)

    def program(lib: Any, name: str, **kwargs: Any) -> Any:
        groups = {"axis_index_groups": [[3, 1, 0], [2]], **kwargs}
        f = lambda v: getattr(lib, name)(v, "x", **groups)  # noqa: E731
        return sharded(f, mesh(4), check_vma=False)

    with pytest.raises(purlin.FallbackError, match="axis_index_groups have different sizes"):
        program(purlin, "psum")(x)
    np.testing.assert_array_equal(
        program(purlin, "psum", backend="lax")(x), program(jax.lax, "psum")(x)
    )
    monkeypatch.delenv("PURLIN_FALLBACK")
    for name in ("psum", "pmax", "pmin"):
        np.testing.assert_array_equal(program(purlin, name)(x), program(jax.lax, name)(x))


@pytest.mark.parametrize("given", ("1", "Error"))
def test_fallback_of_the_environment(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURLIN_FALLBACK", given)
    with pytest.raises(ValueError, match=f"PURLIN_FALLBACK={given}; set it to 'error'"):
        sharded(lambda v: purlin.psum(v, "x"), mesh(4)).lower(jnp.ones(4))


@pytest.mark.parametrize("seconds", (-1, float("nan")))
def test_seconds_to_wait(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="take seconds of 0 or more"):
        purlin.set_timeout(seconds)
    monkeypatch.setenv("PURLIN_TIMEOUT_S", f"{seconds}m")
    with pytest.raises(ValueError, match=r"PURLIN_TIMEOUT_S=.*m; unset it, or set"):
        environment.number("PURLIN_TIMEOUT_S", 1800)
