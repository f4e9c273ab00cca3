"""The reductions of jax.lax by their own names, with its signatures and its behaviour.

Where jax.lax does more than a collective (constants are folded at trace time, booleans are counted,
positional axes are summed), so do these. All take `backend` and `policy` as all_reduce does.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from purlin_jax import groups as groups_lib
from purlin_jax.collectives import all_reduce, reduce_scatter
from purlin_jax.policy import Policy

PyTree = Any


def psum(
    x: PyTree,
    axis_name: Any,
    *,
    axis_index_groups: Any = None,
    backend: str | None = None,
    policy: Policy | str | None = None,
) -> PyTree:
    """jax.lax.psum: the sum over ranks, of all_reduce; booleans are counted."""
    return _reduce("psum", "sum", x, axis_name, axis_index_groups, backend, policy)


def pmax(
    x: PyTree,
    axis_name: Any,
    *,
    axis_index_groups: Any = None,
    backend: str | None = None,
    policy: Policy | str | None = None,
) -> PyTree:
    """jax.lax.pmax: the largest over ranks; NaN where any rank has one."""
    return _reduce("pmax", "max", x, axis_name, axis_index_groups, backend, policy)


def pmin(
    x: PyTree,
    axis_name: Any,
    *,
    axis_index_groups: Any = None,
    backend: str | None = None,
    policy: Policy | str | None = None,
) -> PyTree:
    """jax.lax.pmin: the smallest over ranks; NaN where any rank has one."""
    return _reduce("pmin", "min", x, axis_name, axis_index_groups, backend, policy)


def pmean(
    x: PyTree,
    axis_name: Any,
    *,
    axis_index_groups: Any = None,
    backend: str | None = None,
    policy: Policy | str | None = None,
) -> PyTree:
    """jax.lax.pmean: the sum over ranks, divided by their number."""
    total = psum(x, axis_name, axis_index_groups=axis_index_groups, backend=backend, policy=policy)
    count = jax.lax.psum(1, axis_name, axis_index_groups=axis_index_groups)
    return jax.tree.map(lambda v: v / count, total)


def psum_scatter(
    x: PyTree,
    axis_name: Any,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Any = None,
    tiled: bool = False,
    backend: str | None = None,
    policy: Policy | str | None = None,
) -> PyTree:
    """jax.lax.psum_scatter: reduce_scatter with a sum."""
    return reduce_scatter(
        jax.tree.map(_count_booleans, x),
        axis_name,
        scatter_dimension=scatter_dimension,
        axis_index_groups=axis_index_groups,
        tiled=tiled,
        backend=backend,
        policy=policy,
    )


def _reduce(
    name: str,
    op: str,
    x: PyTree,
    axis_name: Any,
    axis_index_groups: Any,
    backend: str | None,
    policy: Policy | str | None,
) -> PyTree:
    if _is_static(x, axis_name):
        return getattr(jax.lax, name)(x, axis_name, axis_index_groups=axis_index_groups)
    if op == "sum":
        x = jax.tree.map(_count_booleans, x)
    return all_reduce(
        x, axis_name, op, axis_index_groups=axis_index_groups, backend=backend, policy=policy
    )


def _is_static(x: PyTree, axis_name: Any) -> bool:
    """Whether jax.lax would need no communication, or an axis that has no name."""
    names = groups_lib.canonical_axes(axis_name)
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))
    return not traced or any(isinstance(name, int) for name in names)


def _count_booleans(x: Any) -> Any:
    return x.astype(jnp.int32) if x.dtype == np.bool_ else x
