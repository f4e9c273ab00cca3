"""Counted collectives as products with a matrix, which jax can derive."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

import purlin_jax as purlin
from tests.harness import Fn
from tests.varlen import ORDER, exchange, gather, ragged, reduce


class Linear(NamedTuple):
    """A collective as a linear function of the rows [ranks, rows, ...] of one array.

    Of ragged_all_to_all that array is the operand, and behind it the output.
    """

    op: str  # as native code calls it
    run: Fn  # of one rank's rows and numbers
    reference: Fn  # of those of all ranks in numpy
    rows: Fn  # of the argument, from those of what each rank sends and `room`


def _ragged(z: jax.Array, t: Any) -> jax.Array:
    rows = z.shape[0] - t["kept"].shape[0]
    numbers = (t[key] for key in ORDER)
    return purlin.ragged_all_to_all(z[:rows], z[rows:], *numbers, axis_name="x")


def _ragged_expected(z: np.ndarray, t: Any) -> np.ndarray:
    rows = z.shape[1] - t["kept"].shape[1]
    return ragged(z[:, :rows], z[:, rows:], t["starts"], t["sizes"], t["places"])


LINEAR = {
    "all_to_all_v": Linear(
        "all_to_all_v",
        lambda v, t: purlin.all_to_all_v(v, t["sizes"], "x", capacity=t["kept"].shape[0])[0],
        lambda v, t: exchange(v, t["sizes"], t["kept"].shape[1]),
        lambda rows, room: rows,
    ),
    "all_gather_v": Linear(
        "all_gather_v",
        lambda v, t: purlin.all_gather_v(v, t["size"], "x")[0],
        lambda v, t: gather(v, t["size"], len(v) * v.shape[1]),
        lambda rows, room: rows,
    ),
    "reduce_scatter_v": Linear(
        "reduce_scatter_v",
        lambda v, t: purlin.reduce_scatter_v(v, t["blocks"], "x")[0],
        lambda v, t: reduce(v, t["blocks"][0], v.shape[1]),
        lambda rows, room: rows,
    ),
    "ragged_all_to_all": Linear(
        "all_to_all_v", _ragged, _ragged_expected, lambda rows, room: rows + room
    ),
}


def dense(linear: Linear, given: Any, rows: int) -> Fn:
    """The collective on arrays of all ranks as the product with a matrix, for jax to derive."""
    n, room = given["kept"].shape[:2]
    size = n * linear.rows(rows, room)
    basis = np.eye(size, dtype=np.float32).reshape(n, -1, size)
    table = linear.reference(basis, given)
    matrix = table.reshape(-1, size)

    def f(v: Any) -> Any:
        return (matrix @ v.reshape(size, -1)).reshape(n, -1, *v.shape[2:])

    return f
