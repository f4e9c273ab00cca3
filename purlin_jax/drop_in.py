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
from purlin_jax.backend import fall_back, scope
from purlin_jax.collectives import all_reduce, reduce_scatter
from purlin_jax.joined import calling, join
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
    """jax.lax.psum: the sum over ranks, of all_reduce; booleans are counted.

    Args:
      x: array, scalar or pytree of them. Python numbers and arrays that are no tracers are the same
        on all ranks, so nothing is sent for them.
      axis_name: bound mesh axis, or a tuple of them; a number is an axis of the arrays themselves.
      axis_index_groups: groups of indices of the axis that reduce among themselves.
      backend: "auto", "purlin" or "lax"; None takes the context or PURLIN_BACKEND.
      policy: a Policy or the name of a regime; None takes the context or PURLIN_POLICY.

    Returns:
      A pytree like `x`, the same on all ranks; invariant over the axis under check_vma.

    Raises:
      NameError: the axis is not bound by a jax.shard_map around the call.
      TypeError: a dtype of fewer than 4 bits.
    """
    return _reduce("psum", "sum", x, axis_name, axis_index_groups, backend, policy)


def pmax(
    x: PyTree,
    axis_name: Any,
    *,
    axis_index_groups: Any = None,
    backend: str | None = None,
    policy: Policy | str | None = None,
) -> PyTree:
    """jax.lax.pmax: the largest over ranks; NaN where any rank has one.

    Arguments, results and errors are those of psum; complex numbers have no order (TypeError), and
    there is no derivative (NotImplementedError).
    """
    return _reduce("pmax", "max", x, axis_name, axis_index_groups, backend, policy)


def pmin(
    x: PyTree,
    axis_name: Any,
    *,
    axis_index_groups: Any = None,
    backend: str | None = None,
    policy: Policy | str | None = None,
) -> PyTree:
    """jax.lax.pmin: the smallest over ranks; NaN where any rank has one. See pmax."""
    return _reduce("pmin", "min", x, axis_name, axis_index_groups, backend, policy)


def pmean(
    x: PyTree,
    axis_name: Any,
    *,
    axis_index_groups: Any = None,
    backend: str | None = None,
    policy: Policy | str | None = None,
) -> PyTree:
    """jax.lax.pmean: the sum over ranks, divided by their number. See psum."""
    total = _reduce("pmean", "sum", x, axis_name, axis_index_groups, backend, policy)
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
    """jax.lax.psum_scatter: reduce_scatter with a sum; booleans are counted.

    Arguments, results and errors are those of reduce_scatter.
    """
    with calling("psum_scatter"):
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
    fold = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}[op]
    names = [name for name in groups_lib.canonical_axes(axis_name) if not isinstance(name, int)]
    with calling(name):
        joined = join("all_reduce", tuple(names), None, backend, policy, op)
    if axis_index_groups is not None and len({len(group) for group in axis_index_groups}) > 1:
        if joined.backend != "lax":
            reason = "axis_index_groups have different sizes"
            fall_back(joined.op, reason, joined.backend, joined.site)
        with jax.named_scope(scope(joined.op, joined.site)):
            return fold(x, axis_name, axis_index_groups=axis_index_groups)
    leaves, tree = jax.tree.flatten(x)
    folded = [_is_static(leaf, axis_name) for leaf in leaves]
    sent = [leaf for leaf, static in zip(leaves, folded, strict=True) if not static]
    if op == "sum":
        sent = [_count_booleans(leaf) for leaf in sent]
    if sent:
        groups = axis_index_groups
        with calling(name):
            sent = all_reduce(
                sent, axis_name, op, axis_index_groups=groups, backend=backend, policy=policy
            )
    reduced = iter(sent)
    return jax.tree.unflatten(
        tree,
        (
            fold(leaf, axis_name, axis_index_groups=axis_index_groups) if static else next(reduced)
            for leaf, static in zip(leaves, folded, strict=True)
        ),
    )


def _is_static(leaf: Any, axis_name: Any) -> bool:
    """Whether jax.lax needs no communication for it, or there is an axis that has no name."""
    names = groups_lib.canonical_axes(axis_name)
    return not isinstance(leaf, jax.core.Tracer) or any(isinstance(name, int) for name in names)


def _count_booleans(x: Any) -> Any:
    x = jnp.asarray(x)
    return x.astype(jnp.int32) if x.dtype == np.bool_ else x
