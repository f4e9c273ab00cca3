"""Regimes and back ends: who runs a collective and how is what the caller has asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import jax
import numpy as np
import pytest

import purlin_jax as purlin
from purlin_jax import _native
from purlin_jax.policy import table
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

X = random_array("float32", (64, 16))
TINY = 1 << 16  # bytes of staging: most arrays below take several rounds


def _regimes_of(op: str) -> list[purlin.Policy]:
    """Policies that force each regime of a collective in turn, and a tiny staging."""
    regimes = [regime for regime in table("cpu")["regimes"] if op in _native.regimes[regime][0]]
    staged = [regime for regime in regimes if regime in ("staged", "composed")]
    return [
        *(purlin.Policy(regime, blocks) for regime in regimes for blocks in (1, 3)),
        *(purlin.Policy(regime, 2, TINY) for regime in staged),
    ]


def _name(value: Any) -> str:
    """What the CPU heeds of a policy, or a value as it is."""
    if isinstance(value, purlin.Policy):
        return f"{value.regime}-{value.blocks}-{value.staging_bytes}"
    return str(value)


def _each_regime(op: str) -> Any:
    """Worlds and policies; odd and even numbers of ranks, one rank."""
    pairs = [
        (world, forced)
        for forced in _regimes_of(op)
        for world in {1: (3,), 2: (8,), 3: (1, 8)}[forced.blocks]
    ]
    return pytest.mark.parametrize(("world", "forced"), pairs, ids=_name)


def _context(forced: purlin.Policy) -> AbstractContextManager[None]:
    return purlin.policy(**asdict(forced))


def _exchange(v: Any, **kwargs: Any) -> Any:
    return purlin.all_to_all(v, "x", 1, 0, tiled=True, **kwargs)


def _regimes(f: Callable[..., Any], x: Any) -> dict[tuple[str, str], int]:
    """By how much the counters of native regimes rose while f(x) ran."""
    before = purlin.native_regimes()
    jax.block_until_ready(f(x))
    after = purlin.native_regimes()
    return {k: n - before.get(k, 0) for k, n in after.items() if n != before.get(k, 0)}


@pytest.mark.parametrize("forced", _regimes_of("all_to_all"), ids=_name)
def test_context_is_part_of_the_cache_key(forced: purlin.Policy) -> None:
    traces = []

    def f(v: jax.Array) -> Any:
        traces.append(v)
        return _exchange(v)

    program = sharded(f, mesh(8), check_vma=False)
    assert _regimes(program, X) == {("all_to_all", "meet"): 8}
    with _context(forced):
        assert _regimes(program, X) == {("all_to_all", forced.regime): 8}
        assert len(traces) == 2
        assert f"blocks = {forced.blocks} : i64" in program.lower(X).compile().as_text()
        with purlin.policy():
            assert _regimes(program, X) == {("all_to_all", "meet"): 8}
    seen = len(traces)
    assert _regimes(program, X) == {("all_to_all", "meet"): 8}
    assert len(traces) == seen  # outside again, the first program is still there


@pytest.mark.parametrize("forced", _regimes_of("all_reduce"), ids=_name)
def test_argument_wins_over_the_context(forced: purlin.Policy) -> None:
    program = sharded(lambda v: purlin.all_reduce(v, "x", policy=forced), mesh(8), check_vma=False)
    with purlin.policy("meet", blocks=5):
        assert _regimes(program, X) == {("all_reduce", forced.regime): 8}
        assert "blocks = 5 : i64" not in program.lower(X).compile().as_text()
    by_name = sharded(lambda v: purlin.psum(v, "x", policy="packet"), mesh(8), check_vma=False)
    assert _regimes(by_name, X) == {("all_reduce", "packet"): 8}


@_each_regime("all_to_all")
def test_all_to_all_in_each_regime(world: int, forced: purlin.Policy) -> None:
    # Runs of odd numbers of bytes, strided and contiguous boxes, several dtypes in one call.
    rows = world * world
    tree = {
        "odd": random_array("uint8", (rows, 3, 5)),
        "wide": random_array("float32", (rows, 7, 33), 1),
        "half": random_array("bfloat16", (rows, 1, 3), 2),
        "one": random_array("bool", (rows, 1, 1), 3),
        "flat": random_array("complex64", (rows, 1, 1290), 4),
    }
    with _context(forced):
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


@_each_regime("all_gather")
def test_all_gather_in_each_regime(world: int, forced: purlin.Policy) -> None:
    tree = [random_array(d, (world, 7, n), n) for d, n in (("int8", 3), ("float32", 2000))]
    with _context(forced):
        got, expected = parity(
            lambda t: [purlin.all_gather(t, "x", axis=a) for a in (0, 1, 3)],
            lambda t: [
                jax.tree.map(lambda v, a=a: jax.lax.all_gather(v, "x", axis=a), t)
                for a in (0, 1, 3)
            ],
            tree,
            mesh=mesh(world),
            op="all_gather",
            calls=3,
        )
    assert_same_bits(got, expected)


@_each_regime("all_reduce")
def test_all_reduce_in_each_regime(world: int, forced: purlin.Policy) -> None:
    sizes = (1, 2, 3, 33, 130, 9000)
    tree = [random_array(d, (world, n), n) for d in ("float32", "bfloat16") for n in sizes]
    program = sharded(lambda t: purlin.all_reduce(t, "x"), mesh(world), check_vma=False)
    with _context(forced):
        got = run_counted(program, tree, op="all_reduce", calls=4 * world)
    for x, y in zip(tree, got, strict=True):
        assert_same_bits(y, np.repeat(summed(np.split(x, world)), world, 0))


@_each_regime("reduce_scatter")
def test_reduce_scatter_in_each_regime(world: int, forced: purlin.Policy) -> None:
    # Split along the first and along the last axis, so that rows are strided.
    tree = [
        random_array(d, (world * world, 5, 8 * 3 * n), n)
        for d, n in (("float32", 40), ("bfloat16", 1))
    ]
    programs = [
        sharded(
            lambda t, a=a: purlin.reduce_scatter(t, "x", scatter_dimension=a, tiled=True),
            mesh(world),
        )
        for a in (0, 2)
    ]
    with _context(forced):
        by_rows, by_columns = (
            run_counted(p, tree, op="reduce_scatter", calls=2 * world) for p in programs
        )
    for x, rows, columns in zip(tree, by_rows, by_columns, strict=True):
        total = summed(np.split(x, world))
        assert_same_bits(rows, total)
        assert_same_bits(columns, np.concatenate(np.split(total, world, 2)))


@pytest.mark.parametrize(
    "regimes",
    (("packet",), ("zero_staging",), ("staged",), ("packet", "staged", "zero_staging_push")),
)
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
    (
        (("fast",), {}),
        (("",), {}),
        (("packet",), {"blocks": 65}),
        ((), {"blocks": -1}),
        ((), {"threads": -32}),
        ((), {"threads": 48}),
        ((), {"threads": 544}),
        ((), {"depth": 9}),
        ((), {"atom": "volta"}),
        ((), {"staging_bytes": -1}),
    ),
)
def test_bad_policies_raise(args: tuple[str, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"purlin\.policy: "), purlin.policy(*args, **kwargs):
        pass


@pytest.mark.parametrize("kwargs", ({"blocks": "4"}, {"depth": 2.0}, {"threads": True}))
def test_knobs_are_integers(kwargs: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=rf"purlin\.policy: {next(iter(kwargs))}=.* is no integer"):
        purlin.Policy(**kwargs)


def test_threads_reach_the_call_by_context_and_by_argument() -> None:
    program = sharded(_exchange, mesh(8))
    with purlin.policy(threads=96):
        assert "threads = 96 : i64" in program.lower(X).compile().as_text()
    given = sharded(lambda v: _exchange(v, policy=purlin.Policy(threads=512)), mesh(8))
    assert "threads = 512 : i64" in given.lower(X).compile().as_text()


def test_a_regime_that_does_not_fit_says_so_at_trace_time() -> None:
    with pytest.raises(
        ValueError, match=r"all_reduce: regime 'zero_staging_push' is for all_gather"
    ):
        sharded(
            lambda v: purlin.psum(v, "x", policy="zero_staging_push"), mesh(8), check_vma=False
        )(X)
    with pytest.raises(ValueError, match=r"all_to_all: regime 'composed' is for all_reduce alone"):
        sharded(lambda v: _exchange(v, policy="composed"), mesh(8))(X)


def test_staging_that_holds_no_round_says_what_to_do() -> None:
    program = sharded(_exchange, mesh(8))
    x = random_array("float32", (64, 320))
    with (
        purlin.policy("staged", staging_bytes=1024),
        pytest.raises(jax.errors.JaxRuntimeError, match="1024 bytes of staging are too few"),
    ):
        jax.block_until_ready(program(x))
    # Nine lines hold rounds of eight boxes.
    with purlin.policy("staged", staging_bytes=1024 + 128):
        assert _regimes(program, x) == {("all_to_all", "staged"): 8}


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
