"""Counts that are wrong are refused in a sentence; nothing hangs, and the next call works."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purlin_jax as purlin
from tests.harness import Fn, assert_same_bits, mesh, random_array, to_numpy
from tests.varlen import (
    Ranks,
    by_group,
    everything_expected,
    exchange,
    feed,
    flat,
    over,
    ragged,
)

WORLD, ROWS, ROOM = 3, 6, 10
X = random_array("float32", (WORLD, ROWS, 2))
SIZES = np.array([[2, 1, 3], [0, 4, 1], [1, 1, 1]], np.int32)
REGIMES = pytest.mark.parametrize("regime", ("auto", "packet"))


def _refused(program: Fn, given: Any, match: str) -> None:
    start = time.monotonic()
    with pytest.raises(jax.errors.JaxRuntimeError, match=match):
        jax.block_until_ready(program(given))
    assert time.monotonic() - start < 10


def _with(given: Any, key: str, at: Any, value: int) -> Any:
    """`given` with another number."""
    changed = given[key].copy()
    changed[at] = value
    return {**given, key: changed}


@pytest.mark.own_regime
@REGIMES
def test_wrong_counts_at_run_time(regime: str) -> None:
    ranks, rows = flat(WORLD), 8
    given = feed(ranks, "uniform", rows)  # two rows each
    assert given["kept"].shape[1] == 27
    given["starts"][:] = [0, 2, 4]
    given["places"][:] = [[0], [5], [10]]
    with purlin.policy(regime):
        exchanged = over(
            ranks, lambda t: purlin.all_to_all_v(t["x"], t["sizes"], "x", capacity=7)[0]
        )
        gathered = over(ranks, lambda t: purlin.all_gather_v(t["x"], t["size"], "x", capacity=18))
        reduced = over(
            ranks, lambda t: purlin.reduce_scatter_v(t["x"], t["blocks"], "x", capacity=3)
        )
        moved = over(
            ranks,
            lambda t: purlin.ragged_all_to_all(
                t["x"]["a"], t["kept"], t["starts"], t["sizes"], t["places"], t["expected"],
                axis_name="x",
            ),
        )  # fmt: skip
    wrong: list[tuple[Fn, str, Any, int, str]] = [
        (
            exchanged,
            "sizes",
            (1, 2),
            -3,
            "all_to_all_v at test_.* rank 1 sends -3 rows to rank 2; ",
        ),
        (exchanged, "sizes", (1, 0), 5, "rank 1 sends to rank 2 ends at row 9, .* operand has 8"),
        (exchanged, "sizes", (1, 0), 9, "rank 1 sends to rank 0 ends at row 9, .* has 8 rows"),
        (exchanged, "sizes", (0, 1), 4, "rank 1 gets from rank 2 ends at row 8, .* room for 7; r"),
        (gathered, "size", 2, -1, "all_gather_v at test_.* rank 2 sends -1 rows to rank 0; counts"),
        (gathered, "size", 0, 9, "rank 0 sends to rank 0 ends at row 9, .* operand has 8 rows"),
        (gathered, "size", 0, 7, "rank 0 gets from rank 2 ends at row 19, .* room for 18; raise"),
        (
            reduced,
            "blocks",
            (1, 0),
            -(2**31),
            "reduce_scatter_v .* sends -2147483648 rows to rank 0",
        ),
        (reduced, "blocks", (2, 1), 3, "rank 2 sends 3 rows to rank 1, which expects 2; .* agree"),
        (reduced, "blocks", (..., 1), 5, "to rank 2 ends at row 9, and its operand has 8 rows"),
        (reduced, "blocks", (..., 1), 4, "rank 1 gets from rank 0 ends at row 4, .* room for 3;"),
        (moved, "sizes", (2, 0), 1, "rank 2 sends 1 rows to rank 0, which expects 2; the sizes"),
        (moved, "expected", (1, 2), 3, "rank 2 sends 2 rows to rank 1, which expects 3; the size"),
        (moved, "starts", (0, 1), 7, "rank 0 sends to rank 1 ends at row 9, and its operand has"),
        (moved, "starts", (0, 1), -1, "rank 0 sends to rank 1 begins at row -1, and its operand"),
        (moved, "places", (0, 1), 27, "rank 1 gets from rank 0 ends at row 29, .* room for 27; r"),
        (moved, "places", (2, 0), -4, "rank 2 begins at row -4, and .* room for 27 from row 0 on"),
        (moved, "places", (2, 0), 6, "rank 0 gets from rank 2 begins at row 6, among .* rank 1"),
    ]
    for program, key, at, value, match in wrong:
        _refused(program, _with(given, key, at, value), f"bad counts: .*{match}")
        # And the next one works.
        jax.block_until_ready(program(given))
    got = to_numpy((exchanged(given), gathered(given), reduced(given), moved(given)))
    good = everything_expected(ranks, given)
    assert_same_bits(got[3], good["ragged"])
    packed = {"exchange": got[0], "gather": got[1][0], "reduce": got[2][0]}
    for name, mine in packed.items():
        cut = jax.tree.map(lambda a, b: b[:, : a.shape[1]], mine, good[name][0])
        assert_same_bits(mine, cut)


@pytest.mark.own_regime
@REGIMES
def test_other_groups_do_not_wait_for_one_that_failed(regime: str) -> None:
    # Group 0 goes on to a collective of all, to which group 1 will not come.
    groups = [[0, 2], [3, 1]]
    ranks = Ranks(mesh(4), "x", groups, groups)
    x, sizes = random_array("float32", (4, 4, 2)), np.ones((4, 2), np.int32)
    wrong = sizes.copy()
    wrong[1] = [1, -5]

    def f(v: jax.Array, n: jax.Array) -> jax.Array:
        moved, _ = purlin.all_to_all_v(v, n, capacity=2, **ranks.call)
        return purlin.all_gather(moved, "x")

    with purlin.policy(regime):
        program = over(ranks, f)
    for _ in range(3):
        _refused(lambda n: program(x, n), wrong, "rank 1 sends -5 rows to rank 1; counts must")
        moved = by_group(ranks, lambda v, n: exchange(v, n, 2), x, sizes)
        assert_same_bits(np.asarray(program(x, sizes)), np.stack([moved] * 4))


@REGIMES
@pytest.mark.own_regime
def test_rows_that_are_sent_twice_have_no_gradient(regime: str) -> None:
    # They would be sums of rows that come from several ranks, and overlap.
    numbers = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")

    def f(v: jax.Array) -> jax.Array:
        twos = jnp.full(3, 2, jnp.int32)
        rank = jax.lax.axis_index("x")
        places = {"output_offsets": 2 * rank + jnp.zeros(3, jnp.int32)}
        arrays = {**dict.fromkeys(numbers, twos), "input_offsets": [1, 0, 2], **places}
        return purlin.ragged_all_to_all(v, jnp.zeros((6, 2)), **arrays, axis_name="x")

    with purlin.policy(regime):
        program = over(flat(WORLD), f)
        starts, sizes = np.tile([1, 0, 2], (3, 1)), np.full((3, 3), 2)
        places = np.repeat([[0], [2], [4]], 3, 1)
        expected = ragged(X, np.zeros((3, 6, 2), np.float32), starts, sizes, places)
        assert_same_bits(np.asarray(program(X)), expected)
        _refused(
            jax.grad(lambda v: program(v).sum()), X, r"rank 0 gets from rank 1 begins at row 0, amo"
        )


@pytest.mark.own_regime
@pytest.mark.parametrize(
    ("policy", "match"),
    (
        (purlin.Policy("staged", 4, 64), "64 bytes of staging are too few for 1 operands in 4 b"),
        (purlin.Policy("packet"), "the packet regime holds 16384 packets of . bytes for a peer"),
    ),
)
def test_what_does_not_fit_the_windows(policy: purlin.Policy, match: str) -> None:
    # Numbers tell how much travels at most; without them it is all that there is.
    x = np.zeros((WORLD, 1 << 18), np.uint8)

    def f(v: jax.Array, n: Any) -> jax.Array:
        return purlin.all_to_all_v(v, n, "x", capacity=8, policy=policy)[0]

    _refused(lambda v: over(flat(WORLD), f)(v, SIZES), x, match)
    if policy.regime == "packet":
        got = np.asarray(over(flat(WORLD), lambda v: f(v, SIZES.tolist()))(x))
        assert_same_bits(got, exchange(x, SIZES, 8))
