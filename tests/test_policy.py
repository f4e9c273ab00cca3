"""Regimes and back ends: who runs a collective and how is what the caller has asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
import pytest

import purlin_jax as purlin
from tests.harness import (
    assert_same_bits,
    custom_calls,
    exchanged,
    mesh,
    native_collectives,
    parity,
    random_array,
    run_counted,
    sharded,
    summed,
)

REGIMES = ("meet", "packet", "zero_staging")
X = random_array("float32", (64, 16))


def _exchange(v: Any, **kwargs: Any) -> Any:
    return purlin.all_to_all(v, "x", 1, 0, tiled=True, **kwargs)


def _regimes(f: Callable[..., Any], x: Any) -> dict[tuple[str, str], int]:
    """By how much the counters of native regimes rose while f(x) ran."""
    before = purlin.native_regimes()
    jax.block_until_ready(f(x))
    after = purlin.native_regimes()
    return {k: n - before.get(k, 0) for k, n in after.items() if n != before.get(k, 0)}


@pytest.mark.parametrize("blocks", (1, 3))
@pytest.mark.parametrize("regime", REGIMES)
def test_context_is_part_of_the_cache_key(regime: str, blocks: int) -> None:
    traces = []

    def f(v: jax.Array) -> Any:
        traces.append(v)
        return _exchange(v), purlin.all_reduce(v, "x")

    program = sharded(f, mesh(8), check_vma=False)
    ops = ("all_to_all", "all_reduce")
    assert _regimes(program, X) == {(op, "meet"): 8 for op in ops}
    with purlin.policy(regime, blocks=blocks):
        assert _regimes(program, X) == {(op, regime): 8 for op in ops}
        assert len(traces) == 2
        assert f"blocks = {blocks} : i64" in program.lower(X).compile().as_text()
        with purlin.policy():
            assert _regimes(program, X) == {(op, "meet"): 8 for op in ops}
    seen = len(traces)
    assert _regimes(program, X) == {(op, "meet"): 8 for op in ops}
    assert len(traces) == seen  # outside again, the first program is still there


@pytest.mark.parametrize("regime", REGIMES)
def test_policy_as_an_argument_wins_over_the_context(regime: str) -> None:
    for given in (regime, purlin.Policy(regime, blocks=2)):
        program = sharded(lambda v, p=given: _exchange(v, policy=p), mesh(8))
        with purlin.policy("meet", blocks=5):
            assert _regimes(program, X) == {("all_to_all", regime): 8}
            assert "blocks = 5 : i64" not in program.lower(X).compile().as_text()


@pytest.mark.parametrize("blocks", (1, 3))
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("world", (1, 3, 8))
def test_all_to_all_in_each_regime(world: int, regime: str, blocks: int) -> None:
    # Runs of odd numbers of bytes, strided and contiguous boxes, several dtypes in one call.
    rows = world * world
    tree = {
        "odd": random_array("uint8", (rows, 3, 5)),
        "wide": random_array("float32", (rows, 7, 33), 1),
        "half": random_array("bfloat16", (rows, 1, 3), 2),
        "one": random_array("bool", (rows, 1, 1), 3),
        "flat": random_array("complex64", (rows, 1, 129), 4),
    }
    with purlin.policy(regime, blocks=blocks):
        got, expected = parity(
            lambda t: [purlin.all_to_all(t, "x", 0, c, tiled=True) for c in (0, 1, 2)],
            lambda t: [
                jax.tree.map(lambda v, c=c: jax.lax.all_to_all(v, "x", 0, c, tiled=True), t)
                for c in (0, 1, 2)
            ],
            tree,
            mesh=mesh(world),
            op="all_to_all",
            calls=6,
        )
    assert_same_bits(got, expected)


@pytest.mark.parametrize("blocks", (1, 3))
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("world", (1, 3, 8))
def test_all_reduce_in_each_regime(world: int, regime: str, blocks: int) -> None:
    sizes = (1, 2, 3, 33, 130, 1000)
    tree = [random_array(d, (world, n), n) for d in ("float32", "bfloat16") for n in sizes]
    program = sharded(lambda t: purlin.all_reduce(t, "x"), mesh(world), check_vma=False)
    with purlin.policy(regime, blocks=blocks):
        got = run_counted(program, tree, op="all_reduce", calls=4 * world)
    for x, y in zip(tree, got, strict=True):
        assert_same_bits(y, np.repeat(summed(np.split(x, world)), world, 0))


@pytest.mark.parametrize("regimes", (("packet",), ("zero_staging",), ("packet", "zero_staging")))
def test_numbers_of_blocks_may_alternate(regimes: tuple[str, ...]) -> None:
    # All of them use one window: a block must not take what another left there for its own. The
    # data differs from call to call, so that what is left over shows.
    program = sharded(_exchange, mesh(2))
    calls = itertools.product(range(4), (3, 1, 16, 2, 16, 1), regimes)
    for n, (_, blocks, regime) in enumerate(calls):
        x = X + n
        expected = np.concatenate(exchanged(np.split(x, 2), 1, 0))
        with purlin.policy(regime, blocks=blocks):
            assert_same_bits(run_counted(program, x, op="all_to_all", calls=2), expected)


def test_a_packet_call_that_is_too_large_says_what_to_do() -> None:
    x = np.zeros((8, 8 * 20_000), np.float32)
    program = sharded(_exchange, mesh(8))
    with (
        purlin.policy("packet"),
        pytest.raises(jax.errors.JaxRuntimeError, match="not 20000; force zero_staging or leave"),
    ):
        jax.block_until_ready(program(x))
    with purlin.policy("packet"):  # and the next call is as good as any
        assert _regimes(program, X) == {("all_to_all", "packet"): 8}
    assert _regimes(program, x) == {("all_to_all", "meet"): 8}


@pytest.mark.parametrize(
    ("args", "kwargs"),
    ((("fast",), {}), (("",), {}), (("packet",), {"blocks": 65}), ((), {"blocks": -1})),
)
def test_bad_policies_raise(args: tuple[str, ...], kwargs: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"purlin\.policy: "), purlin.policy(*args, **kwargs):
        pass


def test_policy_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURLIN_POLICY", "packet")
    assert _regimes(sharded(_exchange, mesh(8)), X) == {("all_to_all", "packet"): 8}
    with purlin.policy("zero_staging"):
        assert _regimes(sharded(_exchange, mesh(8)), X) == {("all_to_all", "zero_staging"): 8}
    monkeypatch.setenv("PURLIN_POLICY", "fast")
    with pytest.raises(ValueError, match="no regime 'fast'"):
        sharded(_exchange, mesh(8))(X)


@pytest.mark.parametrize("way", ("argument", "context", "environment"))
@pytest.mark.parametrize("op", ("all_to_all", "all_reduce"))
def test_backend_lax_makes_no_native_call(
    op: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kwargs = {"backend": "lax"} if way == "argument" else {}
    if way == "environment":
        monkeypatch.setenv("PURLIN_BACKEND", "lax")

    def f(v: jax.Array) -> jax.Array:
        return v + purlin.all_reduce(v, "x", **kwargs) if op == "all_reduce" else _exchange(
            v, **kwargs
        )  # fmt: skip

    with purlin.backend("lax") if way == "context" else nullcontext():
        compiled = sharded(f, mesh(8)).lower(X).compile()
        assert _regimes(compiled, X) == {}
    assert custom_calls(compiled.as_text()) == 0
    assert native_collectives(compiled.as_text()) == [op.replace("_", "-")]


def test_argument_over_context_over_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    native, none = {("all_to_all", "meet"): 8}, {}
    program = sharded(_exchange, mesh(8))
    assert _regimes(program, X) == native
    with purlin.backend("lax"):
        assert _regimes(program, X) == none
        assert _regimes(sharded(lambda v: _exchange(v, backend="purlin"), mesh(8)), X) == native
    assert _regimes(program, X) == native
    monkeypatch.setenv("PURLIN_BACKEND", "lax")
    with purlin.backend("purlin"):
        assert _regimes(sharded(_exchange, mesh(8)), X) == native
    assert _regimes(sharded(_exchange, mesh(8)), X) == none


def test_unknown_backends_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no backend 'nccl'"), purlin.backend("nccl"):
        pass
    with pytest.raises(ValueError, match="no backend 'nccl'"):
        sharded(lambda v: _exchange(v, backend="nccl"), mesh(8))(X)
    monkeypatch.setenv("PURLIN_BACKEND", "nccl")
    with pytest.raises(ValueError, match="no backend 'nccl'"):
        sharded(_exchange, mesh(8))(X)
