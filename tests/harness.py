"""Helpers: meshes, what a compiled program holds, and the comparison of purlin with jax.lax."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import purlin_jax as purlin
from purlin_jax import domain

Fn = Callable[..., Any]
P = jax.P

_NATIVE = re.compile(
    r"\s((?:ragged-)?all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute"
    r"|collective-broadcast)(?:-start|-done)?\("
)


def mesh(
    n: int,
    names: Sequence[str] = ("x",),
    shape: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
    **kwargs: Any,
) -> Mesh:
    """A mesh over the first `n` CPU devices, in `order` if given."""
    devices = np.array(jax.devices("cpu")[:n])
    if order is not None:
        devices = devices[list(order)]
    return Mesh(devices.reshape(shape or (n,)), tuple(names), **kwargs)


def reordered_2x4(**kwargs: Any) -> Mesh:
    """A 2x4 mesh whose device order is not the order of the devices' numbers."""
    return mesh(8, ("a", "b"), (2, 4), (3, 1, 0, 2, 7, 6, 5, 4), **kwargs)


def native_collectives(hlo: str) -> list[str]:
    """The collectives of XLA itself in the text of a compiled program, started ones included."""
    return _NATIVE.findall(hlo)


LATE_REASON = "these devices are no domain"


def refuse_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let purlin find out in lowering, not before, that it cannot run on the devices."""
    monkeypatch.setattr(domain, "refusal", lambda *_: LATE_REASON)


def custom_calls(hlo: str) -> int:
    """How many calls into purlin the text of a compiled program holds."""
    return hlo.count(f'custom_call_target="{domain.TARGET}"')


def sharded(f: Fn, mesh: Mesh, **kwargs: Any) -> Fn:
    """jit of f in shard_map over all axes of the mesh, along the arrays' first axis if not told."""
    spec = P(mesh.axis_names)
    return jax.jit(jax.shard_map(f, mesh=mesh, **{"in_specs": spec, "out_specs": spec, **kwargs}))


def fresh_python(code: str, *arguments: Any) -> str:
    """What a fresh interpreter prints, in the same environment and with sys.argv[1:] as given."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=Path(__file__).parents[1],  # so that it can import this file
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def to_numpy(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def run_counted(f: Fn, *args: Any, op: str, calls: int) -> Any:
    """f(*args) as numpy; native code must have run `op` exactly `calls` times."""
    before = purlin.native_calls().get(op, 0)
    result = to_numpy(jax.block_until_ready(f(*args)))
    made = purlin.native_calls().get(op, 0) - before
    assert made == calls, f"{made} native calls of {op}, expected {calls}"
    return result


def parity(
    ours: Fn,
    theirs: Fn,
    x: Any,
    *,
    mesh: Mesh,
    in_specs: Any = None,
    out_specs: Any = None,
    check_vma: bool = True,
    op: str,
    calls: int = 1,
) -> tuple[Any, Any]:
    """The results of both in shard_map, after checking that `ours` runs on purlin alone."""
    spec = P(mesh.axis_names)
    kwargs = {
        "in_specs": spec if in_specs is None else in_specs,
        "out_specs": spec if out_specs is None else out_specs,
        "check_vma": check_vma,
    }
    compiled = sharded(ours, mesh, **kwargs).lower(x).compile()
    hlo = compiled.as_text()
    assert custom_calls(hlo) == calls, hlo
    assert native_collectives(hlo) == [], hlo
    got = run_counted(compiled, x, op=op, calls=calls * mesh.size)
    return got, to_numpy(sharded(theirs, mesh, **kwargs)(x))


FOUR_OPS = ("all_reduce", "all_to_all", "all_gather", "reduce_scatter")
EACH_OP = pytest.mark.parametrize("op", FOUR_OPS)
VMA = pytest.mark.parametrize("check_vma", (True, False))


def collective_pair(op: str, axis: Any = "x") -> tuple[Fn, Fn]:
    """The collective from purlin and from jax.lax, on trees of arrays of rank 2 or more."""
    ours, theirs = {
        "all_reduce": (purlin.all_reduce, jax.lax.psum),
        "all_to_all": (
            lambda v, a: purlin.all_to_all(v, a, 1, 0, tiled=True),
            lambda v, a: jax.lax.all_to_all(v, a, 1, 0, tiled=True),
        ),
        "all_gather": (
            lambda v, a: purlin.all_gather(v, a, tiled=True),
            lambda v, a: jax.lax.all_gather(v, a, tiled=True),
        ),
        "reduce_scatter": (
            lambda v, a: purlin.reduce_scatter(v, a, scatter_dimension=1, tiled=True),
            lambda v, a: jax.lax.psum_scatter(v, a, scatter_dimension=1, tiled=True),
        ),
    }[op]
    return lambda v: ours(v, axis), lambda v: jax.tree.map(lambda u: theirs(u, axis), v)


def mixed(c: Fn) -> Fn:
    """A nonlinear function around the collective, whose result varies over the mesh."""
    return lambda v: jnp.sin(c(v * v)).sum() * jnp.cos(v)


def kept(c: Fn) -> Fn:
    """c with its result brought back to the shape of its argument, each element of it in use."""

    def f(v: jax.Array) -> jax.Array:
        y = c(v)
        if y.size < v.size:
            return jnp.tile(y.ravel(), v.size // y.size).reshape(v.shape)
        return sum((i + 1) * part for i, part in enumerate(y.reshape(-1, *v.shape)))

    return f


def assert_like_lax(
    build: Callable[[Fn], Fn], *args: Any, op: str, axis: Any = "x", calls: int | None = None
) -> None:
    """build(collective) on args gives the same with purlin, which must run, as with jax.lax."""
    ours, theirs = (build(c) for c in collective_pair(op, axis))
    before = purlin.native_calls().get(op, 0)
    got = to_numpy(jax.block_until_ready(ours(*args)))
    made = purlin.native_calls().get(op, 0) - before
    assert made > 0 if calls is None else made == calls, f"{made} native calls of {op}"
    expected = to_numpy(theirs(*args))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        # XLA fuses the arithmetic around them differently, so cancellation may show.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(1.0, np.abs(b).max()))


def assert_same_bits(got: Any, expected: Any) -> None:
    """Both trees have the same structure, shapes, dtypes and bytes."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for path, a in jax.tree_util.tree_leaves_with_path(got):
        b = expected
        for key in path:
            b = b[getattr(key, "key", getattr(key, "idx", None))]
        where = jax.tree_util.keystr(path)
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), where
        raw_a, raw_b = (np.frombuffer(v.tobytes(), np.uint8) for v in (a, b))
        np.testing.assert_array_equal(raw_a, raw_b, err_msg=where)


def random_array(dtype: Any, shape: Sequence[int], seed: int = 0) -> np.ndarray:
    """Random data of any dtype: normal floats, integers over the whole range."""
    rng, kind = np.random.default_rng(seed), np.dtype(dtype)
    if kind == np.bool_:
        return rng.integers(0, 2, shape).astype(kind)
    if kind.kind in "iu":
        info = np.iinfo(kind)
        return rng.integers(info.min, info.max, shape, dtype=kind, endpoint=True)
    if kind.kind == "c":
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(kind)
    return rng.normal(size=shape).astype(np.float32).astype(kind)


def exchanged(shards: Sequence[np.ndarray], split: int, concat: int) -> list[np.ndarray]:
    """all_to_all (tiled) of one group in numpy: one result for each rank."""
    world = len(shards)
    blocks = [np.split(s, world, split) for s in shards]
    return [np.concatenate([b[r] for b in blocks], concat) for r in range(world)]


def summed(shards: Sequence[np.ndarray]) -> np.ndarray:
    """all_reduce of one group in numpy: from rank 0 upwards in float32, rounded once."""
    total = shards[0].astype(np.float32)
    for shard in shards[1:]:
        total = total + shard.astype(np.float32)
    return total.astype(shards[0].dtype)


def all_reduced(x: np.ndarray, world: int) -> np.ndarray:
    """What the ranks of a flat mesh hold after all_reduce of x, one after another; or of bools.

    Integers wrap around, complex numbers are summed in themselves.
    """
    shards = np.split(x, world)
    if x.dtype == np.bool_:
        total = np.any(shards, 0)
    elif x.dtype.kind in "iuc":
        total = np.add.reduce(shards, dtype=x.dtype)
    else:
        total = summed(shards)
    return np.concatenate([total] * world)


def all_four(v: jax.Array) -> dict[str, jax.Array]:
    """Each of FOUR_OPS over "x" on an array of rank 2, as numpy does in all_four_expected."""
    return {
        "all_reduce": purlin.all_reduce(v, "x"),
        "all_to_all": purlin.all_to_all(v, "x", 1, 0, tiled=True),
        "all_gather": purlin.all_gather(v, "x", tiled=True),
        "reduce_scatter": purlin.reduce_scatter(v, "x", tiled=True),
    }


def all_four_expected(x: np.ndarray, world: int) -> dict[str, np.ndarray]:
    """What the ranks hold after all_four, one after another."""
    shards = np.split(x, world)
    return {
        "all_reduce": all_reduced(x, world),
        "all_to_all": np.concatenate(exchanged(shards, 1, 0)),
        "all_gather": np.concatenate([x] * world),
        "reduce_scatter": summed(shards),
    }
