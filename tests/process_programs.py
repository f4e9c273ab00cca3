"""Programs that each process of a job runs: NAME PROCESS COUNT DEVICES PORT ARGS."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

import purlin_jax as purlin
from purlin_jax import _native

P = jax.P
Fn = Callable[..., Any]


def mesh_of(names: Any = ("x",), shape: Any = (-1,), order: Any = None) -> Mesh:
    """A mesh over the devices of all processes."""
    devices = np.array(jax.devices())
    return Mesh(devices[order if order is not None else slice(None)].reshape(shape), names)


def put(x: np.ndarray, mesh: Mesh, spec: Any = None) -> jax.Array:
    """An array that all processes know, over all devices along its first axis unless told."""
    sharding = NamedSharding(mesh, P(mesh.axis_names) if spec is None else spec)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def over(f: Fn, mesh: Mesh) -> Fn:
    spec = P(mesh.axis_names)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped)


def same(got: Any, expected: Any, what: str = "") -> None:
    """What this process holds of `got` is what it holds of `expected`: arrays, or all of numpy."""
    assert jax.tree.structure(got) == jax.tree.structure(expected), what
    for path, a in jax.tree_util.tree_leaves_with_path(got):
        b: Any = expected
        for key in path:
            b = b[getattr(key, "key", getattr(key, "idx", None))]
        where = f"{what} {jax.tree_util.keystr(path)}"
        assert (a.shape, a.dtype) == (b.shape, b.dtype), (where, a.shape, b.shape, a.dtype, b.dtype)
        theirs = (
            {}
            if isinstance(b, np.ndarray)
            else {str(s.index): s.data for s in b.addressable_shards}
        )
        for s in a.addressable_shards:
            one = np.asarray(theirs[str(s.index)]) if theirs else b[s.index]
            np.testing.assert_array_equal(np.asarray(s.data), one, err_msg=where)


def like_lax(f: Fn, mesh: Mesh, *xs: np.ndarray, what: str) -> None:
    """f(backend) gives the same with purlin, which must run, as with jax.lax."""
    arrays = [put(x, mesh) for x in xs]
    before = sum(purlin.native_calls().values())
    got = jax.block_until_ready(over(f("purlin"), mesh)(*arrays))
    assert sum(purlin.native_calls().values()) > before, what
    if mesh.devices.flat[0].platform != "cpu":  # NCCL takes no two processes on one GPU
        cpus = np.array(jax.local_devices(backend="cpu"))[: mesh.size]
        mesh = Mesh(cpus.reshape(mesh.devices.shape), mesh.axis_names)
        arrays = [put(x, mesh) for x in xs]
    same(got, over(f("lax"), mesh)(*arrays), what)


def numbers(dtype: Any, shape: Any, seed: int = 0) -> np.ndarray:
    """Random small integers, whose sums are exact in any dtype."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 2 if dtype == np.bool_ else 8, shape)
    if np.dtype(dtype).kind == "c":
        return (x + 1j * rng.integers(0, 8, shape)).astype(dtype)
    return x.astype(dtype)


def _fixed(v: jax.Array, ops: Collection[str]) -> dict[str, Any]:
    name = "or" if v.dtype == jnp.bool_ else "sum"
    forms = {
        "all_reduce": lambda: purlin.all_reduce(v, "x", name),
        "all_to_all": lambda: purlin.all_to_all(v, "x", 1, 0, tiled=True),
        "all_gather": lambda: purlin.all_gather(v, "x", tiled=True),
        "reduce_scatter": lambda: purlin.reduce_scatter(v, "x", name, tiled=True),
    }
    results = {op: form() for op, form in forms.items() if op in ops}
    if "all_reduce" in ops and v.dtype != jnp.bool_:
        results["psum"] = purlin.psum({"tree": [v, v[:1]]}, "x")["tree"][1]
    if "all_reduce" in ops and v.dtype in (jnp.float32, jnp.int8):
        results["pmax"] = purlin.pmax(v, "x")
    return results


def _fixed_expected(x: np.ndarray, n: int, like: dict[str, Any]) -> dict[str, Any]:
    shards = np.stack(np.split(x, n))
    total = np.any(shards, 0) if x.dtype == np.bool_ else shards.sum(0, dtype=x.dtype)
    every = {
        "all_reduce": np.concatenate([total] * n),
        "all_to_all": np.concatenate(np.split(x, n, 1)),
        "all_gather": np.concatenate([x] * n),
        "reduce_scatter": total,
        "psum": np.concatenate([total[:1]] * n),
        "pmax": np.concatenate([shards.max(0)] * n),
    }
    return {name: every[name] for name in like}


_SIZES = {"auto": 1, "packet": 3, "line": 30}  # of others: 301


def fixed(*ways: str) -> None:
    """The fixed collectives in several dtypes and sizes; a program for each "regime[:atom]"."""
    mesh = mesh_of()
    n = mesh.size
    on_cpus = mesh.devices.flat[0].platform == "cpu"
    xs = {
        f"{np.dtype(dtype).name}": numbers(dtype, (n * n, n * width, 3))
        for dtype, width in (
            (np.bool_, 1),
            (np.int8, 5),
            (jnp.bfloat16, 1),
            (np.float32, 3),
            (np.complex64, 2),
        )
        if n < 8 or dtype == np.float32  # with many processes, all takes longer
    }
    for way in ways:
        regime, _, atom = way.partition(":")
        ops = _native.regimes[regime][0] if regime != "auto" else _native.collectives
        wide = {k: np.tile(x, (1, _SIZES.get(regime, 301), 1)) for k, x in xs.items()}
        if regime == "auto":  # all bands of the table, and nothing at all
            wide |= {f"f{k}": numbers(np.float32, (n * n, n, k)) for k in (1, 999, 640_009 // n**2)}

        def f(tree: Any, regime: str = regime, atom: str = atom, ops: Any = ops) -> Any:
            staging = 0 if regime != "staged" else 4096 if on_cpus else 1 << 18
            with purlin.policy(regime, atom=atom, staging_bytes=staging):
                # Made empty in here: XLA ends the process of a program with empty operands.
                parts = {k: v[..., :0] if k == "f1" else v for k, v in tree.items()}
                return {k: _fixed(v, ops) for k, v in parts.items()}

        got = over(f, mesh)({k: put(x, mesh) for k, x in wide.items()})
        for k, y in got.items():
            x = wide[k][..., :0] if k == "f1" else wide[k]
            same(y, _fixed_expected(x, n, y), f"{way} {k}")
        if regime != "auto":
            assert any(used == regime for _, used in purlin.native_regimes())


def counted() -> None:
    """The collectives whose counts are data, against jax.lax."""
    mesh = mesh_of()
    n = mesh.size
    sizes = np.random.default_rng(1).integers(0, 4, (n, n)).astype(np.int32)
    rows, most = max(int(sizes.sum(1).max()), n * n), int(sizes.sum(0).max())
    x = numbers(np.float32, (n * rows, 3))
    starts = (np.cumsum(sizes, 1) - sizes).astype(np.int32)
    places = (np.cumsum(sizes, 0) - sizes).astype(np.int32)
    table = np.concatenate([starts, sizes, places, sizes.T], 1).astype(np.int32)  # of each rank

    def f(backend: str) -> Fn:
        def body(x: jax.Array, table: jax.Array) -> Any:
            start, size, place, comes = jnp.split(table[0], 4)
            to, got = purlin.all_to_all_v(x, size, "x", capacity=most, backend=backend)
            ring = [(i, (i + 1) % n) for i in range(n)]
            results = (
                to,
                got,
                purlin.all_gather_v(x, size[0], "x", capacity=3 * n, backend=backend),
                purlin.reduce_scatter_v(x, list(range(n)), "x", capacity=n, backend=backend),
                purlin.ragged_all_to_all(
                    x,
                    -jnp.ones((most, 3)),
                    start,
                    size,
                    place,
                    comes,
                    axis_name="x",
                    backend=backend,
                ),
                purlin.ppermute({"a": x, "b": x[:, :1]}, "x", ring, backend=backend),
            )
            return jax.tree.map(jnp.atleast_1d, results)

        return body

    like_lax(f, mesh, x, table, what="counted")


def transforms() -> None:
    """Derivatives, vmap, axes within and across processes, groups, reordered devices."""
    flat = mesh_of()
    n = flat.size
    x = numbers(np.float32, (n * n, n, 3))

    def derived(backend: str) -> Fn:
        def exchanged(v: jax.Array) -> jax.Array:
            return purlin.all_to_all(v * v, "x", 1, 0, tiled=True, backend=backend)

        def loss(v: jax.Array) -> jax.Array:
            y = exchanged(v)
            return (y * jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)).sum()

        return lambda v: (jax.grad(loss)(v), jax.vmap(exchanged, 2, 2)(v))

    like_lax(derived, flat, x, what="grad and vmap")
    half = n // 2 or 1
    split = [list(range(0, n, 2)), list(range(1, n, 2))] if n % 2 == 0 else [list(range(n))[::-1]]
    order = np.random.default_rng(3).permutation(n)
    meshes = {"grid": mesh_of(("a", "b"), (half, n // half))}
    meshes["reordered"] = mesh_of(("a", "b"), (n // half, half), order)
    for what, mesh in meshes.items():
        for axes in ("a", "b", ("a", "b"), ("b", "a")):

            def grid(backend: str, axes: Any = axes) -> Fn:
                return lambda v: (
                    purlin.all_to_all(v, axes, 1, 0, tiled=True, backend=backend),
                    purlin.all_reduce(v, axes, backend=backend),
                    purlin.all_gather(v, axes, tiled=True, backend=backend),
                )

            like_lax(grid, mesh, x, what=f"{what} {axes}")

    def grouped(v: jax.Array) -> jax.Array:
        return purlin.all_gather(v, "x", axis_index_groups=split, tiled=True)

    shards = np.split(x, n)
    of = {i: np.concatenate([shards[j] for j in group]) for group in split for i in group}
    expected = np.concatenate([of[i] for i in range(n)])
    same(over(grouped, flat)(put(x, flat)), expected, "groups")


def everything(*regimes: str) -> None:
    fixed(*regimes)
    counted()
    transforms()


def small() -> None:
    fixed("auto")
    counted()


PROGRAMS: dict[str, Fn] = {f.__name__: f for f in (everything, small, fixed, counted, transforms)}


def main(name: str, process: str, count: str, devices: str, port: str, *args: str) -> None:
    faulthandler.register(signal.SIGUSR1)  # what the threads do, for the launcher
    on_gpus = os.environ.get("JAX_PLATFORMS", "").startswith("cuda")
    cpus = int(devices) * int(count) if on_gpus else int(devices)  # on GPUs, to compare with
    jax.config.update("jax_num_cpu_devices", cpus)
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(process))
    start = time.monotonic()
    from tests import process_faults, process_hosts, process_runs

    programs = dict(PROGRAMS)
    from tests.gpu import process_programs as gpu_programs

    for module in (process_runs, process_faults, process_hosts, gpu_programs):
        programs |= module.PROGRAMS
    programs[name](*args)
    print(f"DONE {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
