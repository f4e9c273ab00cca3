"""Each regime and each Atom moves and folds every dtype bit for bit as the CPU's kernels do.

The CPU's are proved against jax.lax elsewhere. Many collectives stand in one program, since
compiling takes the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import purlin_jax as purlin
from purlin_jax import _native, domain
from purlin_jax.table_check import ATOMS, FLAGGED
from tests.gpu.harness import gpus, sharded

pytestmark = pytest.mark.gpu

REGIMES = [regime for regime in _native.regimes if regime != "meet"]
CASES = [
    (regime, atom)
    for regime in REGIMES
    for atom in ATOMS
    if atom == "generic" or (atom != "cpu" and regime not in FLAGGED)
]
COPY_CASES = [c for c in CASES if "all_gather" in _native.regimes[c[0]][0]]
REDUCE_CASES = [c for c in CASES if "all_reduce" in _native.regimes[c[0]][0]]
COPIES = ("bool", "uint8", "float16", "float32", "complex64", "complex128")
# Bytes of an operand: less than a packet, odd, more than a block's share, enough for bulk copies.
SIZES = (3, 1001, 40_000, 450_007)


@pytest.fixture(autouse=True)
def _wide() -> Any:
    with jax.enable_x64(True):
        yield


def _cpus(mesh: Mesh) -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[: mesh.size]), mesh.axis_names)


def _values(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers that each dtype holds and whose folds show what was done in which order."""
    rng = np.random.default_rng(seed)
    kind = jnp.dtype(dtype)
    if jnp.issubdtype(kind, jnp.bool_):
        return rng.integers(0, 2, shape).astype(bool)
    if jnp.issubdtype(kind, jnp.integer):
        return rng.integers(0, 100, shape).astype(kind)
    x = rng.normal(size=shape)
    if jnp.issubdtype(kind, jnp.complexfloating):
        x = x + 1j * rng.normal(size=shape)
    return np.asarray(x).astype(kind)


def _check(
    functions: list[Callable[..., Any]], arrays: list[np.ndarray], regime: str, atom: str
) -> None:
    mesh = gpus()
    if _capability(mesh) < domain.cuda.atoms.get(atom, 1000):
        pytest.skip(f"no Atom {atom} for this GPU in the binary")

    def program(*xs: jax.Array) -> list[jax.Array]:
        return [f(x) for f, x in zip(functions, xs, strict=True)]

    with purlin.policy(regime, atom=atom), purlin.backend("purlin"):
        ours = sharded(program, mesh)(*arrays)
    with purlin.backend("purlin"):
        expected = sharded(program, _cpus(mesh))(*arrays)
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        left, right = np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)
        assert np.array_equal(left, right), (i, arrays[i].dtype, arrays[i].shape)


def _capability(mesh: Mesh) -> int:
    return int(domain.arch("cuda", mesh)[3:])


@pytest.mark.parametrize(("regime", "atom"), COPY_CASES)
def test_copies(regime: str, atom: str) -> None:
    fitting = _native.regimes[regime][0]
    n = gpus().size
    functions: list[Callable[..., Any]] = []
    arrays: list[np.ndarray] = []
    if "all_gather" in fitting:
        for axis in (0, 1):
            for dtype in COPIES:
                functions.append(lambda v, axis=axis: purlin.all_gather(v, "x", axis=axis))
                arrays.append(_values(dtype, (n * 3, 5, 7), axis))
        for size in SIZES:
            functions.append(lambda v: purlin.all_gather(v, "x", tiled=True))
            arrays.append(_values("uint8", (n * size,), size))
    if "all_to_all" in fitting:
        for split, concat in ((0, 0), (0, 1), (1, 2), (2, 0), (2, 1)):
            for dtype in ("uint8", "float16", "float32", "complex128"):
                functions.append(
                    lambda v, a=(split, concat): purlin.all_to_all(v, "x", *a, tiled=True)
                )
                arrays.append(_values(dtype, (n * n * 3, n * 5, n * 7), split))
        for size in SIZES:
            functions.append(lambda v: purlin.all_to_all(v, "x", 0, 0, tiled=True))
            arrays.append(_values("uint8", (n * n * size,), size))
        # Long rows with gaps on one side, as of heads and sequence.
        for split, concat in ((1, 0), (0, 1)):
            functions.append(lambda v, a=(split, concat): purlin.all_to_all(v, "x", *a, tiled=True))
            arrays.append(_values("float32", (n * n * 4, n * 2048), 1))
    _check(functions, arrays, regime, atom)


@pytest.mark.parametrize(("regime", "atom"), REDUCE_CASES)
def test_reductions_of_every_dtype(regime: str, atom: str) -> None:
    n = gpus().size
    functions: list[Callable[..., Any]] = []
    arrays: list[np.ndarray] = []
    for op, dtype in domain.cuda.reduces:
        if regime in FLAGGED and dtype == "complex128":
            continue  # 16 bytes do not fit the words of packets and lines
        functions.append(lambda v, op=op: purlin.all_reduce(v, "x", op=op))
        arrays.append(_values(dtype, (n * 11, 3), 0))
    _check(functions, arrays, regime, atom)


@pytest.mark.parametrize(("regime", "atom"), REDUCE_CASES)
def test_sums_of_every_size(regime: str, atom: str) -> None:
    n = gpus().size
    fitting = _native.regimes[regime][0]
    functions: list[Callable[..., Any]] = []
    arrays: list[np.ndarray] = []
    for dtype in ("float32", "bfloat16", "float16", "int32"):
        items = jnp.dtype(dtype).itemsize
        for size in SIZES:
            count = max(1, size // items // (2 if regime == "packet" else 1))
            functions.append(lambda v: purlin.all_reduce(v, "x"))
            arrays.append(_values(dtype, (n * count,), size))
            if "reduce_scatter" in fitting:
                functions.append(lambda v: purlin.reduce_scatter(v, "x", tiled=True))
                arrays.append(_values(dtype, (n * n * count,), size))
    if "reduce_scatter" in fitting:
        for axis in (1, 2):
            functions.append(
                lambda v, axis=axis: purlin.reduce_scatter(
                    v, "x", scatter_dimension=axis, tiled=True
                )
            )
            arrays.append(_values("bfloat16", (n * 3, n * 5, n * 4), axis))
    _check(functions, arrays, regime, atom)
