"""From axis names to groups of ranks."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from purlin_jax import _compat

AxisName = Hashable | tuple[Hashable, ...]
Groups = tuple[tuple[int, ...], ...]


def canonical_axes(axis_name: AxisName) -> tuple[Hashable, ...]:
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def require_bound(op: str, axes: Sequence[Hashable]) -> None:
    """Raise NameError, with what to do, for an axis that nothing around the call binds."""
    for axis in axes:
        if not _compat.axis_is_bound(axis):
            raise NameError(
                f"purlin.{op}: axis {axis!r} is not bound; call it inside jax.shard_map over a "
                f"mesh with an axis {axis!r}"
            )


def vmapped(axes: Sequence[Hashable]) -> list[Hashable]:
    """Those of the bound axes that a vmap has named: their elements lie on one device."""
    mesh_axes = jax.sharding.get_abstract_mesh().axis_names
    return [axis for axis in axes if axis not in mesh_axes]


def canonical_groups(op: str, groups: Any, axis_size: int) -> Groups | None:
    """axis_index_groups as tuples, checked as jax.lax does: each index once, equal sizes."""
    if groups is None:
        return None
    result = tuple(tuple(int(i) for i in group) for group in groups)
    if sorted(i for group in result for i in group) != list(range(axis_size)):
        raise ValueError(
            f"purlin.{op}: axis_index_groups {result} must hold each of the {axis_size} indices "
            "of the axis exactly once"
        )
    if len({len(group) for group in result}) > 1:
        raise ValueError(
            f"purlin.{op}: axis_index_groups {result} have different sizes; make them equal"
        )
    return result


def world_size(axes: Sequence[Hashable], groups: Groups | None) -> int:
    """Number of ranks that one collective joins."""
    return len(groups[0]) if groups else math.prod(jax.lax.axis_size(a) for a in axes)


def own_rank(axes: Sequence[Hashable], groups: Groups | None) -> Any:
    """The calling rank's number in its group."""
    index = jax.lax.axis_index(tuple(axes))
    if groups is None:
        return index
    within = {i: r for group in groups for r, i in enumerate(group)}
    return jnp.asarray([within[i] for i in range(len(within))])[index]


def own_block(x: jax.Array, axis: int, axes: Sequence[Hashable], groups: Groups | None) -> Any:
    """The block of `x` along `axis` that belongs to the calling rank of its group."""
    rank = own_rank(axes, groups)
    size = x.shape[axis] // world_size(axes, groups)
    return jax.lax.dynamic_slice_in_dim(x, rank * size, size, axis)


def partition(mesh: Any, axes: Sequence[Hashable], groups: Groups | None) -> np.ndarray:
    """All groups of the mesh as rows of logical device numbers, [groups, world] int64.

    Rank r of a group is the device with index r along `axes`, the first of them slowest.
    """
    numbers = np.arange(mesh.size).reshape(tuple(mesh.axis_sizes))
    where = [mesh.axis_names.index(a) for a in axes]
    joined = math.prod(mesh.axis_sizes[w] for w in where)
    rows = np.moveaxis(numbers, where, range(len(where))).reshape(joined, -1).T
    if groups is not None:
        rows = np.concatenate([rows[:, list(group)] for group in groups])
    return np.ascontiguousarray(rows, np.int64)
