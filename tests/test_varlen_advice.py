"""What is wrong with a counted call is said when it is traced, in a sentence with a remedy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purlin_jax as purlin
from tests.harness import Fn, random_array
from tests.varlen import (
    flat,
    over,
)

WORLD, ROWS, ROOM = 3, 6, 10
X = random_array("float32", (WORLD, ROWS, 2))
SIZES = np.array([[2, 1, 3], [0, 4, 1], [1, 1, 1]], np.int32)


def _a2a(*args: Any, **kwargs: Any) -> Fn:
    """all_to_all_v of the operand with other arguments."""
    return lambda v, n: purlin.all_to_all_v(v, *(args or (n,)), "x", **{"capacity": ROOM, **kwargs})


# What is called, the error, and what its sentence holds.
ADVICE: dict[str, tuple[Fn, type[Exception], str]] = {
    "no capacity": (
        _a2a(capacity=None),
        ValueError,
        r"all_to_all_v: the result needs a static number of rows; pass capacity=",
    ),
    "negative capacity": (_a2a(capacity=-1), ValueError, r"capacity=-1 must not be negative"),
    "traced capacity": (
        lambda v, n: purlin.all_to_all_v(v, n, "x", capacity=n.sum()),
        TypeError,
        r"capacity=.* is no integer that is known when the program is traced; shapes are static",
    ),
    "half a row": (_a2a(capacity=1.5), TypeError, r"capacity=1\.5 is no integer"),
    "capacity below numbers": (
        _a2a(SIZES, capacity=5),
        ValueError,
        r"a rank gets 6 rows, and capacity=5; raise it, or leave it out",
    ),
    "gather below numbers": (
        lambda v, n: purlin.all_gather_v(v, [1, 2, 3], "x", capacity=5),
        ValueError,
        r"all_gather_v: a rank gets 6 rows, and capacity=5; raise it",
    ),
    "reduce below numbers": (
        lambda v, n: purlin.reduce_scatter_v(v, [1, 2, 3], "x", capacity=2),
        ValueError,
        r"reduce_scatter_v: a rank gets 3 rows, and capacity=2; raise it",
    ),
    "rows of one rank": (
        _a2a(SIZES * 2),
        ValueError,
        r"the counts of rank 0 need 12 rows and the operand has 6",
    ),
    "rows of a gather": (
        lambda v, n: purlin.all_gather_v(v, [1, 7, 3], "x"),
        ValueError,
        r"all_gather_v: the counts of rank 1 need 7 rows and the operand has 6",
    ),
    "rows of all": (
        lambda v, n: purlin.reduce_scatter_v(v, [3, 3, 3], "x"),
        ValueError,
        r"reduce_scatter_v: the counts need 9 rows and the operand has 6",
    ),
    "negative numbers": (
        _a2a([3, -1, 0]),
        ValueError,
        r"counts \[3, -1, 0\] must not be negative",
    ),
    "too few numbers": (_a2a([3, 0]), ValueError, r"counts of shape \[2\], expected \[3\] for 3 r"),
    "uneven numbers": (
        _a2a([[1, 2], [3], [4]]),
        ValueError,
        r"counts \[\[1, 2\], \[3\], \[4\]\] are no array; give as many for each rank",
    ),
    "numbers with a point": (
        _a2a([1.0, 2.0, 3.0]),
        TypeError,
        r"counts are integers, not float64",
    ),
    "counts with a point": (
        lambda v, n: purlin.all_to_all_v(v, n * 1.0, "x", capacity=ROOM),
        TypeError,
        r"counts are integers, not float32",
    ),
    "one count": (
        lambda v, n: purlin.all_to_all_v(v, n[0], "x", capacity=ROOM),
        ValueError,
        r"counts of shape \[\], expected \[3\] for 3 ranks",
    ),
    "three counts": (
        lambda v, n: purlin.all_gather_v(v, n, "x"),
        ValueError,
        r"all_gather_v: counts of shape \[3\], expected \[\] for 3 ranks",
    ),
    "fill": (_a2a(fill=1), ValueError, r"fill=1 is neither 0 nor None"),
    "no operand": (
        lambda v, n: purlin.all_to_all_v({}, n, "x", capacity=ROOM),
        ValueError,
        r"operands of shapes \[\]; give one or more arrays",
    ),
    "a scalar": (
        lambda v, n: purlin.all_gather_v(v[0, 0], n[0], "x"),
        ValueError,
        r"operands of shapes \[\(\)\]; give one or more arrays",
    ),
    "other rows": (
        lambda v, n: purlin.all_to_all_v([v, v[1:]], n, "x", capacity=ROOM),
        ValueError,
        r"operands of shapes \[\(6, 2\), \(5, 2\)\]; give .* with as many rows",
    ),
    "no such reduction": (
        lambda v, n: purlin.reduce_scatter_v(v, n, "x", "mean"),
        ValueError,
        r"reduce_scatter_v: no reduction 'mean'; take one of",
    ),
    "a sum of booleans": (
        lambda v, n: purlin.reduce_scatter_v(v > 0, n, "x"),
        TypeError,
        r"reduce_scatter_v: a sum of booleans is no boolean",
    ),
    "no such axis": (
        lambda v, n: purlin.all_gather_v(v, n[0], "y"),
        NameError,
        r"all_gather_v: axis 'y' is not bound; call it inside jax\.shard_map",
    ),
    "groups": (
        _a2a(axis_index_groups=[[0, 1], [2]]),
        ValueError,
        r"have different sizes; make them equal",
    ),
    "two bits": (
        lambda v, n: purlin.all_to_all_v(v.astype(jnp.int2), n, "x", capacity=ROOM),
        TypeError,
        r"no collective carries int2; widen it",
    ),
    "four bits": (
        lambda v, n: purlin.all_to_all_v(v.astype(jnp.int4), n, "x", capacity=ROOM),
        purlin.FallbackError,
        r"int4 has fewer than 8 bits\. Use backend='lax'",
    ),
}


@pytest.mark.parametrize("case", ADVICE)
def test_advice(case: str) -> None:
    f, error, match = ADVICE[case]
    with pytest.raises(error, match=match):
        jax.eval_shape(over(flat(WORLD), lambda v, n: f(v, n)[0]), X, SIZES)


def test_regimes_of_other_collectives() -> None:
    for regime in ("line", "zero_staging_push", "composed"):
        program = over(flat(WORLD), lambda v, n, r=regime: _a2a(policy=r)(v, n)[0])
        with pytest.raises(ValueError, match=rf"all_to_all_v: regime '{regime}' is for .* alone;"):
            program.lower(X, SIZES)


def test_outside_shard_map() -> None:
    for f in (purlin.all_to_all_v, purlin.all_gather_v, purlin.reduce_scatter_v):
        with pytest.raises(NameError, match=rf"{f.__name__}: axis 'x' is not bound"):
            jax.jit(f, static_argnums=2)(X[0], SIZES[0], "x")


RAGGED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "input_offsets": ({"input_offsets": jnp.zeros(4, jnp.int32)}, ValueError, r"\(4,\); the four"),
    "recv_sizes": ({"recv_sizes": jnp.zeros((3, 1), int)}, ValueError, r"recv_sizes has shape \(3"),
    "send_sizes": (
        {"send_sizes": jnp.ones(3)},
        TypeError,
        r"purlin.ragged_all_to_all: counts are integers, not float32",
    ),
    "output": (
        {"output": jnp.zeros((9, 3))},
        ValueError,
        r"output is float32\[9,3\].* and operand",
    ),
    "dtype": ({"output": jnp.zeros((9, 2), int)}, ValueError, r"may differ in the number of rows"),
    "no rows": ({"output": jnp.zeros(())}, ValueError, r"output is float32\[\].* and operand"),
    "operand": ({"operand": jnp.zeros(())}, ValueError, r"operands of shapes \[\(\)\]; give one"),
}


@pytest.mark.parametrize("case", RAGGED)
def test_advice_about_slices(case: str) -> None:
    given, error, match = RAGGED[case]
    numbers = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")

    def f(v: jax.Array, n: jax.Array) -> jax.Array:
        arrays = {"operand": v, "output": jnp.zeros((9, 2)), **dict.fromkeys(numbers, n)}
        return purlin.ragged_all_to_all(**{**arrays, **given}, axis_name="x")

    with pytest.raises(error, match=match):
        jax.eval_shape(over(flat(WORLD), f), X, SIZES)
