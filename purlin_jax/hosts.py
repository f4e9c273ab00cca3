"""Collectives over several hosts: purlin's inside each of them, jax.lax's across.

A group whose mesh axes either stay on a host or lead from host to host is the product of both. So a
collective over it is one over the inner axes and one over the outer axes, and blocks are cut and
joined along an axis for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from purlin_jax import primitive
from purlin_jax.lax_forms import lax_equivalent
from purlin_jax.primitive import Params

Axes = tuple[Hashable, ...]


class Split(NamedTuple):
    """The axes of a collective: those that lead to other hosts, and those that do not."""

    outer: Axes
    inner: Axes


def split(mesh: Any, axes: Axes, hosts: np.ndarray) -> Split | None:
    """How axes split, if each is of one kind; `hosts` of all devices, shaped like the mesh.

    Axes of size 1 are of either kind.
    """
    found: dict[Hashable, bool] = {}  # whether the host changes along it
    for axis in axes:
        along = np.moveaxis(hosts, mesh.axis_names.index(axis), 0)
        changes = (along != along[:1]).any()
        distinct = all(len(set(line)) == len(line) for line in along.reshape(len(along), -1).T)
        if changes and not distinct:
            return None
        found[axis] = bool(changes)
    return Split(
        tuple(a for a in axes if found[a]),
        tuple(a for a in axes if not found[a]),
    )


def keeps_to_them(hosts: np.ndarray, partition: np.ndarray) -> bool:
    """Whether no group of devices leaves its host."""
    of_groups = hosts.ravel()[partition]
    return bool((of_groups == of_groups[:, :1]).all())


class _Grid:
    """An axis of blocks, one for each rank, seen as an axis for outer and one for inner ranks."""

    def __init__(self, params: Params, parts: Split, sizes: dict[Hashable, int]) -> None:
        self.shape = [sizes[a] for a in params.axes]
        self.order = [params.axes.index(a) for a in (*parts.outer, *parts.inner)]
        self.outer = math.prod(sizes[a] for a in parts.outer)
        self.inner = math.prod(sizes[a] for a in parts.inner)

    def open(self, x: jax.Array, axis: int) -> jax.Array:
        """[..., ranks * n, ...] as [outer, inner, ..., n, ...]."""
        x = x.reshape(*x.shape[:axis], *self.shape, -1, *x.shape[axis + 1 :])
        x = jnp.moveaxis(x, [axis + i for i in self.order], range(len(self.order)))
        return x.reshape(self.outer, self.inner, *x.shape[len(self.order) :])

    def close(self, x: jax.Array, axis: int) -> jax.Array:
        """The inverse of open."""
        sizes = [self.shape[i] for i in self.order]
        x = x.reshape(*sizes, *x.shape[2:])
        x = jnp.moveaxis(x, range(len(sizes)), [axis + i for i in self.order])
        n = len(sizes)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + n + 1 :])


def composed(params: Params, parts: Split, operands: Sequence[Any]) -> list[Any]:
    """The collective over both kinds of axes."""
    sizes = {a: int(jax.lax.axis_size(a)) for a in params.axes}
    grid = _Grid(params, parts, sizes)

    def inside(op: str, xs: list[Any], split_axis: int, concat_axis: int) -> list[Any]:
        return primitive.bind(_part(params, op, parts.inner, grid.inner, split_axis, concat_axis,
                                    len(xs)), xs)  # fmt: skip

    def across(op: str, xs: list[Any], split_axis: int, concat_axis: int) -> list[Any]:
        return lax_equivalent(_part(params, op, parts.outer, grid.outer, split_axis, concat_axis,
                                    len(xs)), xs)  # fmt: skip

    xs = list(operands)
    if params.op == "all_reduce":
        flat = [_padded(x.reshape(-1), grid.inner) for x in xs]
        pieces = across("all_reduce", inside("reduce_scatter", flat, 0, 0), 0, 0)
        whole = inside("all_gather", pieces, 0, 0)
        return [y[: x.size].reshape(x.shape) for x, y in zip(xs, whole, strict=True)]
    if params.op == "all_gather":
        near = inside("all_gather", [x[None, None] for x in xs], 0, 1)
        far = across("all_gather", near, 0, 0)
        return [grid.close(y, axis) for y, axis in zip(far, params.concat, strict=True)]
    opened = [grid.open(x, axis) for x, axis in zip(xs, params.split, strict=True)]
    if params.op == "reduce_scatter":
        near = inside("reduce_scatter", opened, 1, 0)
        far = across("reduce_scatter", near, 0, 0)
        return [y[0, 0] for y in far]
    near = inside("all_to_all", opened, 1, 1)
    far = across("all_to_all", near, 0, 0)
    return [grid.close(y, axis) for y, axis in zip(far, params.concat, strict=True)]


def _part(
    params: Params, op: str, axes: Axes, world: int, split_axis: int, concat_axis: int, n: int
) -> Params:
    return params._replace(
        op=op,
        reduce="" if op in ("all_gather", "all_to_all") else params.reduce,
        axes=axes,
        world=world,
        split=(split_axis,) * n,
        concat=(concat_axis,) * n,
        invariant=False,
    )


def _padded(x: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(x, (0, -x.size % multiple))
