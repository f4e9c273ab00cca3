"""Every reduction of every dtype, bit for bit against an oracle that folds in rank order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import purlin_jax as purlin
from purlin_jax import _native
from tests.harness import mesh, sharded

WORLD = 3
NARROW = {"float16", "bfloat16", *(d for _, d in _native.reduces if d.startswith("float8"))}
FOLD: dict[str, Any] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _values(name: str, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Every code of small dtypes, random ones of others; NaN and infinity among the floats."""
    rng = np.random.default_rng(seed)
    dtype = _dtype(name)
    if name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if name.startswith("complex"):
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    values = raw.view(dtype)[..., 0]
    if np.dtype(name if name in ("float32", "float64") else np.int8).kind == "f":
        return rng.normal(size=shape).astype(dtype)  # few of the raw codes are ordinary numbers
    return values


def _expected(name: str, op: str, rows: np.ndarray) -> np.ndarray:
    wide = rows.astype(np.float32) if name in NARROW else rows
    total = wide[0]
    with np.errstate(all="ignore"):
        for row in wide[1:]:
            total = FOLD[op](total, row)
        return np.asarray(total).astype(_dtype(name))


@pytest.mark.parametrize(("op", "name"), _native.reduces)
@pytest.mark.parametrize(
    "regime", [None, pytest.param("packet", marks=pytest.mark.own_regime)], ids=str
)
def test_reduction(op: str, name: str, regime: str | None) -> None:
    x = np.stack([_values(name, r, (1, 515)) for r in range(WORLD)])[:, 0]
    with jax.enable_x64(True):
        f = sharded(
            lambda v: purlin.all_reduce(v, "x", op, policy=regime), mesh(WORLD), check_vma=False
        )
        y = np.asarray(f(jnp.asarray(x)))
    expected = _expected(name, op, x)
    for row in y:
        assert row.dtype == expected.dtype
        nan = expected != expected
        np.testing.assert_array_equal(row != row, nan)
        if name.startswith("complex") and op == "prod":  # numpy fuses; both are roundings
            np.testing.assert_allclose(row, expected, rtol=1e-5 if name == "complex64" else 1e-13)
            continue
        same = row.view(np.uint8).reshape(len(row), -1) == expected.view(np.uint8).reshape(
            len(row), -1
        )
        assert same[~nan].all(), (row[~nan][~same[~nan].all(1)], expected[~nan])


def test_every_code_of_small_floats_survives() -> None:
    """The sum over one rank: widen and narrow alone."""
    same = sharded(lambda v: purlin.all_reduce(v, "x"), mesh(1), check_vma=False)
    for name in sorted(NARROW):
        dtype = _dtype(name)
        raw = f"u{dtype.itemsize}"
        # In four parts, each of which fits the packets of one call.
        for part in np.split(np.arange(1 << 8 * dtype.itemsize, dtype=raw), 4):
            codes = part.view(dtype)
            y = np.asarray(same(jnp.asarray(codes)))
            nan = codes != codes
            np.testing.assert_array_equal(y != y, nan, err_msg=name)
            np.testing.assert_array_equal(y.view(raw)[~nan], part[~nan], err_msg=name)


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_nan_wins_on_whichever_rank(op: str, rank: int) -> None:
    x = np.ones((WORLD, 4), np.float32)
    x[rank, 2] = np.nan
    y = np.asarray(
        sharded(lambda v: purlin.all_reduce(v, "x", op), mesh(WORLD), check_vma=False)(x)
    )
    assert np.isnan(y[:, 2]).all() and (y[:, [0, 1, 3]] == 1).all()


def test_reductions_that_make_no_sense_are_refused() -> None:
    for op, x in (("and", jnp.ones(3)), ("max", jnp.ones(3, jnp.complex64))):
        with pytest.raises(TypeError, match=rf"purlin\.all_reduce: no '{op}' of {x.dtype}"):
            sharded(lambda v, op=op: purlin.all_reduce(v, "x", op), mesh(3))(x)
