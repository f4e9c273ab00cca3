"""Independent collectives, threads and programs in flight: every value is the right one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purlin_jax as purlin
from tests.harness import (
    assert_same_bits,
    exchanged,
    mesh,
    parity,
    reordered_2x4,
    run_counted,
    sharded,
    summed,
    to_numpy,
)

WORLD = 8
CALLS = 12
SIZE = 16
_TURN = np.roll(np.eye(SIZE, dtype=np.float32), 1, 0)


def _turns(rank: Any, i: int) -> Any:
    return (rank * 3 + i) % 5 * 20


def _work(xp: Any, turn: Callable[[Any, Any], Any], v: Any, i: int, rank: Any) -> Any:
    """Exact work before collective `i` that takes another time on every rank."""
    return [
        lambda: turn(v, _turns(rank, i)),
        lambda: xp.sort(v, 0) + i,
        lambda: xp.cumsum(v, 1) - i,
    ][i % 3]()


def _axes(i: int) -> tuple[int, int]:
    return ((0, 1), (1, 0), (0, 0), (1, 1))[i // 2 % 4]


def _program(calls: range) -> Callable[[Any], Any]:
    """Collectives without dependencies: XLA may start them in another order on every device."""

    def turn(v: jax.Array, n: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, n, lambda _, u: _TURN @ u, v)

    def f(v: jax.Array) -> list[jax.Array]:
        results = []
        for i in calls:
            w = _work(jnp, turn, v, i, jax.lax.axis_index("x"))
            if i % 2:
                results.append(purlin.all_reduce(w, "x"))
            else:
                results.append(purlin.all_to_all(w, "x", *_axes(i), tiled=True))
        return results

    # check_vma=False shows what every single rank holds, also of the sums.
    return sharded(f, mesh(WORLD), check_vma=False)


def _expected(x: np.ndarray, calls: range) -> list[np.ndarray]:
    results = []
    for i in calls:
        shards = [
            _work(np, lambda v, n: np.roll(v, n, 0), v, i, rank)
            for rank, v in enumerate(np.split(x, WORLD))
        ]
        moved = [summed(shards)] * WORLD if i % 2 else exchanged(shards, *_axes(i))
        results.append(np.concatenate(moved))
    return results


def _data(seed: int) -> np.ndarray:
    """Small integers, whose sums are exact."""
    return np.random.default_rng(seed).integers(0, 64, (WORLD * SIZE, SIZE)).astype(np.float32)


@pytest.mark.parametrize(("regime", "runs"), (("auto", 40), ("packet", 10), ("zero_staging", 10)))
def test_independent_collectives(regime: str, runs: int) -> None:
    program = _program(range(CALLS))
    with purlin.policy(regime):
        for seed in range(runs):
            x = _data(seed)
            got = run_counted(program, x, op="all_reduce", calls=CALLS // 2 * WORLD)
            assert_same_bits(got, _expected(x, range(CALLS)))


@pytest.mark.parametrize("same", (True, False), ids=("one executable", "two executables"))
@pytest.mark.parametrize("regime", ("auto", "packet"))
def test_two_threads(same: bool, regime: str) -> None:
    calls = (range(4), range(4) if same else range(2, 7))
    first = _program(calls[0])
    programs = (first, first if same else _program(calls[1]))

    def work(thread: int) -> int:
        # A thread has its own contexts, so each enters the policy.
        with purlin.policy(regime):
            for n in range(200 if regime == "auto" else 50):
                x = _data(1000 * thread + n % 20)
                assert_same_bits(to_numpy(programs[thread](x)), _expected(x, calls[thread]))
        return thread

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, (0, 1))) == [0, 1]


def test_three_programs_in_flight() -> None:
    calls = (range(3), range(3, 8), range(6, 12))
    programs = [_program(c) for c in calls]
    for seed in range(10):
        x = [_data(10 * seed + i) for i in range(3)]
        results = [program(v) for program, v in zip(programs, x, strict=True)]
        for got, v, c in zip(results, x, calls, strict=True):
            assert_same_bits(to_numpy(got), _expected(v, c))


def test_runs_of_one_program_in_flight() -> None:
    program = _program(range(4))
    x = [_data(seed) for seed in range(8)]
    for v, got in zip(x, [program(v) for v in x], strict=True):
        assert_same_bits(to_numpy(got), _expected(v, range(4)))


@pytest.mark.parametrize("regime", ("auto", "packet", "zero_staging"))
def test_sub_axes_alternate(regime: str) -> None:
    def program(all_to_all: Callable[..., Any]) -> Callable[[Any], Any]:
        def f(v: jax.Array) -> list[jax.Array]:
            independent = [all_to_all(v + i, "ab"[i % 2], 1, 0, tiled=True) for i in range(6)]
            chained = v
            for i in range(6):
                chained = all_to_all(chained, "ab"[i % 2], 1, 1, tiled=True) + i
            return [*independent, chained]

        return f

    both = (program(purlin.all_to_all), program(jax.lax.all_to_all))
    with purlin.policy(regime):
        for seed in range(3):
            args = {"mesh": reordered_2x4(), "op": "all_to_all", "calls": 12}
            assert_same_bits(*parity(*both, _data(seed), **args))
