"""Collectives whose counts are data: each regime and each Atom gives the bits of the CPU's."""

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
from tests.gpu.harness import gpus, run_program, sharded

pytestmark = pytest.mark.gpu

CASES = [
    (regime, atom)
    for regime, (ops, _) in _native.regimes.items()
    for atom in ATOMS
    if "all_to_all_v" in ops and regime != "meet"
    if atom == "generic" or (atom != "cpu" and regime not in FLAGGED)
]
DTYPES = ("bool", "uint8", "bfloat16", "float32", "complex64")
# Rows at most for a peer, and items of a row: odd ones, and more than a block's share.
SHAPES = ((3, 1), (50, 3), (17, 64), (1500, 20))


def _counts(kind: str, most: int, world: int) -> np.ndarray:
    """[sender, receiver]"""
    rng = np.random.default_rng(most)
    if kind == "nobody":
        return np.zeros((world, world), np.int32)
    if kind == "one":
        only = np.zeros((world, world), np.int32)
        only[-1, 0] = most
        return only
    return rng.integers(0, most + 1, (world, world)).astype(np.int32)


def _operations(most: int, world: int) -> dict[str, Callable[[Any, Any], Any]]:
    def ragged(x: Any, s: Any) -> Any:
        rank = jax.lax.axis_index("x")
        received = s[:, rank]
        total = most * world
        # Packed from behind, on both sides.
        starts = jnp.cumsum(s[rank][::-1])[::-1] - s[rank]
        places = jnp.cumsum(s[::-1], 0)[::-1] - s
        output = jnp.zeros((total + 1, *x.shape[1:]), x.dtype)
        return purlin.ragged_all_to_all(
            x, output, starts, s[rank], places[rank], received, axis_name="x"
        )

    def rows(x: Any, s: Any) -> Any:
        return s[jax.lax.axis_index("x")]

    return {
        "all_to_all_v": lambda x, s: purlin.all_to_all_v(x, rows(x, s), "x", capacity=most * world),
        "all_gather_v": lambda x, s: purlin.all_gather_v(x, rows(x, s)[0], "x"),
        "reduce_scatter_v": lambda x, s: purlin.reduce_scatter_v(x, s[0], "x", "max"),
        "sum": lambda x, s: purlin.reduce_scatter_v(x, s[0], "x", capacity=most),
        "ragged": ragged,
        "ppermute": lambda x, _: purlin.ppermute(
            x, "x", [(i, (i + 1) % world) for i in range(world)]
        ),
    }


def _check(mesh: Mesh, kind: str, shape: tuple[int, int], regime: str, atom: str) -> None:
    world, (most, width) = mesh.size, shape
    counts = _counts(kind, most, world)
    rng = np.random.default_rng(0)
    arrays, functions = [], []
    for name, f in _operations(most, world).items():
        for dtype in DTYPES:
            if name in ("sum", "reduce_scatter_v") and dtype in ("bool", "complex64"):
                continue
            functions.append(f)
            values = rng.integers(0, 2 if dtype == "bool" else 100, (world, most * world, width))
            arrays.append(values.reshape(-1, width).astype(jnp.dtype(dtype)))

    def program(s: jax.Array, *xs: jax.Array) -> list[Any]:
        results = [f(x, s) for f, x in zip(functions, xs, strict=True)]
        return jax.tree.map(jnp.atleast_1d, results)

    def run(on: Mesh) -> list[Any]:
        on_all = sharded(program, on, in_specs=(jax.P(), *[jax.P("x")] * len(arrays)))
        return jax.tree.map(np.asarray, on_all(counts, *arrays))

    with purlin.policy(regime, atom=atom), purlin.backend("purlin"):
        ours = run(mesh)
    with purlin.backend("purlin"):
        expected = run(Mesh(np.array(jax.devices("cpu")[:world]), mesh.axis_names))
    for i, (a, b) in enumerate(zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True)):
        assert np.array_equal(a.view(np.uint8), b.view(np.uint8)), (i, a.dtype, a.shape)


@pytest.mark.parametrize(("regime", "atom"), CASES)
@pytest.mark.parametrize(
    ("kind", "shape"), [("any", s) for s in SHAPES] + [("nobody", SHAPES[0]), ("one", SHAPES[2])]
)
def test_bits_of_the_cpu(kind: str, shape: tuple[int, int], regime: str, atom: str) -> None:
    mesh = gpus()
    if int(domain.arch("cuda", mesh)[3:]) < domain.cuda.atoms.get(atom, 1000):
        pytest.skip(f"no Atom {atom} for this GPU in the binary")
    _check(mesh, kind, shape, regime, atom)


def test_counts_that_change_in_replays() -> None:
    """One recorded program, other data and counts in each of 200 steps."""
    mesh = gpus()
    world, most = mesh.size, 40
    rng = np.random.default_rng(0)
    counts = rng.integers(0, most + 1, (200, world, world)).astype(np.int32)
    x = rng.integers(0, 100, (world * most * world, 5)).astype(np.float32)

    def f(x: jax.Array, all_counts: jax.Array) -> jax.Array:
        def step(total: jax.Array, s: jax.Array) -> Any:
            mine = s[jax.lax.axis_index("x")]
            out, received = purlin.all_to_all_v(x + total[0], mine, "x", capacity=most * world)
            even = purlin.all_to_all(out, "x", 0, 0, tiled=True)
            return (total + out.sum(0) + even[0] + received.sum()) % 1000, None

        return jax.lax.scan(step, jnp.zeros(5, jnp.float32), all_counts)[0]

    def run(on: Mesh) -> np.ndarray:
        program = sharded(f, on, in_specs=(jax.P("x"), jax.P()))
        return np.asarray(program(x, counts))

    np.testing.assert_array_equal(
        run(mesh), run(Mesh(np.array(jax.devices("cpu")[:world]), mesh.axis_names))
    )


@pytest.mark.parametrize(
    ("kind", "says"),
    (
        ("negative", "sends -3 rows to rank 0"),
        ("outside", "ends at row 10"),
        ("capacity", "has room for"),
    ),
)
def test_bad_counts_are_reported(kind: str, says: str) -> None:
    result = run_program("bad_counts", kind, timeout=120, check=False)
    assert result.returncode != 0 and "no error" not in result.stdout
    assert "purlin: bad counts: all_to_all_v call 2 at all_to_all_v in programs.py:" in (
        result.stderr
    ), result.stderr[-2000:]
    assert says in result.stderr
