"""Programs of collectives over hosts, which processes of this machine stand for."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import purlin_jax as purlin
from tests.process_programs import Fn, like_lax, numbers


def _each(backend: str, axes: Any, world: int, size: int) -> Fn:
    """The four fixed collectives over some axes, and a gradient through two of them."""
    with_all: dict[str, Any] = {"backend": backend}

    def f(x: jax.Array) -> Any:
        def loss(v: jax.Array) -> jax.Array:
            gathered = purlin.all_gather(v, axes, axis=1, tiled=True, **with_all)
            return (purlin.reduce_scatter(gathered**2, axes, tiled=True, **with_all) * 3).sum()

        found = [
            purlin.all_reduce(x, axes, **with_all),
            purlin.all_reduce(x[0, 0], axes, "max", **with_all),
            purlin.all_gather(x, axes, axis=1, tiled=True, **with_all),
            purlin.reduce_scatter(x, axes, **with_all) if x.shape[0] == world else x,
            purlin.reduce_scatter(x, axes, scatter_dimension=1, tiled=True, **with_all),
            jax.grad(loss)(x),
        ]
        if world == size:
            found.append(purlin.all_to_all(x, axes, 1, 0, tiled=True, **with_all))
        return found

    return f


def hosts(count: str) -> None:
    """Groups within hosts, across them, and both, in every order of axes."""
    devices = np.array(jax.devices()).reshape(int(count), -1)
    meshes = [Mesh(devices, ("host", "gpu")), Mesh(devices.T, ("gpu", "host"))]
    axes: list[Any] = ["gpu", ("host", "gpu"), ("gpu", "host")]
    if devices.shape[1] % 2 == 0:
        three = devices.reshape(int(count), -1, 2).transpose(1, 0, 2)
        meshes.append(Mesh(three, ("a", "host", "b")))
    for mesh in meshes:
        for over in axes if "gpu" in mesh.axis_names else [("b", "host"), ("a", "host", "b")]:
            names = (over,) if isinstance(over, str) else over
            world = int(np.prod([mesh.shape[name] for name in names]))
            x = numbers(np.float32, (mesh.size * mesh.size, mesh.size, 5))
            like_lax(
                lambda backend, n=names, w=world, m=mesh: _each(backend, n, w, m.size),
                mesh,
                x,
                what=f"{names} of {mesh.axis_names}",
            )


PROGRAMS: dict[str, Fn] = {"hosts": hosts}
