"""What users of other libraries saw only after many calls: stale data, stalls, growing memory.

Rows are numbered as in test_user_reports.py. Of the reports about ranks that never arrive, see
test_waits.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import purlin_jax as purlin
from purlin_jax import _native, domain
from purlin_jax.policy import table
from tests.harness import (
    EACH_OP,
    FOUR_OPS,
    Fn,
    all_four,
    all_four_expected,
    assert_same_bits,
    mesh,
    random_array,
    reordered_2x4,
    run_counted,
    sharded,
    to_numpy,
)
from tests.memory import NEEDS_GLIBC, heap

pytestmark = pytest.mark.usefixtures("optimised")

WORLD = 2
OPS_AND_REGIMES = pytest.mark.parametrize(
    ("op", "regime"),
    [
        (op, regime)
        for op in FOUR_OPS
        for regime in table("cpu")["regimes"]
        if op in _native.regimes[regime][0]
    ],
)
# The default, and the regimes of all four collectives in which ranks wait for each other.
WAITING = pytest.mark.parametrize("regime", ("auto", "packet", "staged", "zero_staging"))


@pytest.fixture(autouse=True)
def _a_stall_is_an_error() -> Iterator[None]:
    slow, seconds = domain.budget()
    purlin.set_timeout(60.0)
    yield
    purlin.set_timeout(seconds, slow=slow)


def _mean(op: str) -> Fn:
    """A function of an array of WORLD rows, alike on all ranks, that sends it and returns it."""
    return {
        "all_reduce": lambda v: purlin.all_reduce(v, "x") / WORLD,
        "all_to_all": lambda v: purlin.all_to_all(v, "x", 0, 0, tiled=True),
        "all_gather": lambda v: purlin.all_gather(v, "x").sum(0) / WORLD,
        "reduce_scatter": lambda v: jnp.repeat(
            purlin.reduce_scatter(v, "x", tiled=True) / WORLD, WORLD, 0
        ),
    }[op]


@OPS_AND_REGIMES
def test_row_46_ten_thousand_steps_of_a_scan(op: str, regime: str) -> None:
    steps, send = 10_000, _mean(op)

    def f(v: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (send(c) + 1, None), v, length=steps)[0]

    program = sharded(f, mesh(WORLD), check_vma=False)
    with purlin.policy(regime):
        got = run_counted(program, np.zeros((WORLD**2, 3), np.float32), op=op, calls=steps * WORLD)
    assert (got == steps).all()


@WAITING
def test_row_48_calls_and_reads_alternate(regime: str) -> None:
    rng = np.random.default_rng(0)
    program = sharded(all_four, mesh(WORLD), check_vma=False)
    with purlin.policy(regime):
        for i in range(1000):
            x = np.arange(WORLD * WORLD * 4, dtype=np.float32).reshape(WORLD**2, 4) + i
            got = to_numpy(program(x))
            assert_same_bits(got, all_four_expected(x, WORLD))
            time.sleep(rng.uniform(0, 5e-4))


@pytest.mark.parametrize("regime", ("meet", "packet"))
def test_row_50_two_groups_alternate(regime: str) -> None:
    pairs, programs = 500, 5
    prime = 1009  # keeps the sums of 4 ranks small, and what is stale apart from what is due

    def f(v: jax.Array) -> jax.Array:
        def pair(c: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            c = (purlin.all_reduce(c, "a") + c * 3 + i) % prime
            return (purlin.all_reduce(c, "b") + c * 5 + 1) % prime, None

        return jax.lax.scan(pair, v, jnp.arange(pairs))[0]

    x = np.arange(8 * 5, dtype=np.int32).reshape(8, 5)
    program = sharded(f, reordered_2x4(), check_vma=False)
    with purlin.policy(regime):
        before = purlin.native_regimes().get(("all_reduce", regime), 0)
        got = jnp.asarray(x)
        results = [got := program(got) for _ in range(programs)]  # no wait in between
        results = to_numpy(results)
        made = purlin.native_regimes()["all_reduce", regime] - before
    assert made == 2 * pairs * programs * 8
    expected = x.reshape(2, 4, 5).astype(np.int64)
    for result in results:
        for i in range(pairs):
            expected = (expected.sum(0, keepdims=True) + expected * 3 + i) % prime
            expected = (expected.sum(1, keepdims=True) + expected * 5 + 1) % prime
        np.testing.assert_array_equal(result, expected.reshape(8, 5))


@NEEDS_GLIBC
@WAITING
def test_row_57_memory_stays_over_many_calls(regime: str) -> None:
    steps, repeats = 2500, 5  # of four collectives: 50,000 on each rank

    def f(v: jax.Array) -> jax.Array:
        def step(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            for op in FOUR_OPS:
                c = _mean(op)(c)
            return c + 1, None

        return jax.lax.scan(step, v, length=steps)[0]

    inside = sharded(f, mesh(WORLD), check_vma=False)
    outside = sharded(_mean("all_reduce"), mesh(WORLD), check_vma=False)

    def run(times: int) -> None:
        for _ in range(times):
            assert (to_numpy(inside(x)) == steps + 1).all()
        for _ in range(250 * times):
            jax.block_until_ready(outside(x))

    x = np.ones((WORLD**2, 64), np.float32)
    with purlin.policy(regime):
        run(2)
        before = heap()
        run(repeats)
    # 100 bytes a collective and rank would be 10 MiB.
    assert heap() - before < 2


@NEEDS_GLIBC
@pytest.mark.parametrize("regime", ("auto", "staged"))
def test_row_57_memory_stays_over_many_shapes(regime: str) -> None:
    rng = np.random.default_rng(0)
    sizes = np.unique((2 ** rng.uniform(7, 18, 100)).astype(int))  # 1 KiB to 2 MiB on a rank
    rng.shuffle(sizes)
    warm_up = 30

    before = 0.0
    with purlin.policy(regime):
        for i, n in enumerate(sizes):
            if i == warm_up:
                before = heap()
            program = sharded(_mean(FOUR_OPS[i % 4]), mesh(WORLD), check_vma=False)
            x = np.full((WORLD**2, n), i, np.float32)
            assert (to_numpy(program(x)) == i).all()
            if i % 10 == 9:
                jax.clear_caches()  # JAX keeps every program, which is not what is measured
    # The operands of both ranks, kept, would be 44 MiB.
    assert len(sizes) > 95 and heap() - before < 8


@OPS_AND_REGIMES
def test_row_60_the_next_operation_reads_after_the_collective(op: str, regime: str) -> None:
    turns = 1000 if op == "all_reduce" else 250
    rows = 32 if regime == "packet" else 512  # 1 MiB, or what packets hold
    send = _mean(op)

    def f(v: jax.Array) -> jax.Array:
        rank = jax.lax.axis_index("x")
        # In an exchange row r comes from rank r.
        added = jnp.arange(WORLD)[:, None, None] if op == "all_to_all" else (WORLD - 1) / 2

        def turn(i: jax.Array, wrong: jax.Array) -> jax.Array:
            x = v + i  # another value each time, so that what the last turn left would be seen
            z = send(x + rank) * 2
            return wrong + (z != 2 * (x + added)).sum()

        return jax.lax.fori_loop(0, turns, turn, 0)[None]

    program = sharded(f, mesh(WORLD), check_vma=False)
    x = np.zeros((WORLD**2, rows // WORLD, 512), np.float32)
    with purlin.policy(regime):
        assert (run_counted(program, x, op=op, calls=turns * WORLD) == 0).all()


@WAITING
@pytest.mark.parametrize("blocks", (1, 64))
def test_row_52_a_rank_that_works_meanwhile(regime: str, blocks: int) -> None:
    # Each rank in turn comes late from work that takes all cores; with 64 blocks a rank, many
    # more of them wait for it than there are cores.
    world = 4
    turn = np.roll(np.eye(400, dtype=np.float32), 1, 0)

    def f(v: jax.Array) -> list[Any]:
        results = []
        for late in range(world):
            n = jnp.where(jax.lax.axis_index("x") == late, 20, 0)
            moved = jax.lax.fori_loop(0, n, lambda _, u: turn @ u, jnp.asarray(turn))
            results.append(all_four(v + late + moved.sum() - 400))
        return results

    x = random_array("int8", (world**2, world)).astype(np.float32)  # whose sums are exact
    with purlin.policy(regime, blocks=blocks):
        program = sharded(f, mesh(world), check_vma=False)
        for i in range(3):
            expected = [all_four_expected(x + i + late, world) for late in range(world)]
            assert_same_bits(to_numpy(program(x + i)), expected)


@WAITING
@EACH_OP
def test_row_53_other_programs_start_while_a_rank_waits(op: str, regime: str) -> None:
    started, release = threading.Event(), threading.Event()

    def hold(rank: Any, v: Any) -> Any:
        if int(rank) == 1:
            started.set()
            assert release.wait(30)
        return np.asarray(v)

    def held(v: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(v.shape, v.dtype)
        v = _mean(op)(v)
        return _mean(op)(jax.pure_callback(hold, shape, jax.lax.axis_index("x"), v) + 1)

    x = np.ones((WORLD**2, 6), np.float32)
    y = random_array("int8", (9, 3)).astype(np.float32)
    elsewhere = Mesh(np.array(jax.devices("cpu")[5:8]), ("x",))
    with purlin.policy(regime):
        waits = sharded(held, mesh(WORLD), check_vma=False)(x)
        try:
            assert started.wait(30)
            # One program for other devices, one for the same. Their results are not waited for:
            # XLA's CPU client runs nothing while a callback blocks, not even without collectives.
            beside = sharded(all_four, elsewhere, check_vma=False)(y)
            after = sharded(all_four, mesh(WORLD), check_vma=False)(2 * x)
            large = jnp.ones((1 << 25,), device=jax.devices("cpu")[1])
            assert not waits.is_ready()
        finally:
            release.set()
        assert (to_numpy(waits) == 2).all()
        assert_same_bits(to_numpy(beside), all_four_expected(y, 3))
        assert_same_bits(to_numpy(after), all_four_expected(2 * x, WORLD))
        assert large.sum() == 1 << 25
