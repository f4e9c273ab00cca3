"""The collectives that users call inside jax.shard_map, with the semantics of jax.lax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from purlin_jax import groups as groups_lib
from purlin_jax._compat import TO_WITHOUT_VMA, check_vma
from purlin_jax.backend import fall_back, scope
from purlin_jax.joined import Joined, join
from purlin_jax.policy import Policy

PyTree = Any


def _canonical_axis(op: str, what: str, axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise ValueError(f"purlin.{op}: {what}={axis} is outside an array of rank {rank}")
    return axis % rank


def _check_split(joined: Joined, shape: Sequence[int], axis: int, tiled: bool) -> None:
    size, world = shape[axis], joined.world
    if tiled and size % world:
        raise ValueError(
            f"purlin.{joined.name}: axis {axis} of {tuple(shape)} does not divide over {world} "
            f"ranks; pad it to {-(-size // world) * world}"
        )
    if not tiled and size != world:
        raise ValueError(
            f"purlin.{joined.name}: untiled, axis {axis} of {tuple(shape)} must have the size "
            f"{world} of the axis; pass tiled=True to cut a longer one"
        )


def all_to_all(
    x: PyTree,
    axis_name: groups_lib.AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
    backend: str | None = None,
    policy: Policy | str | None = None,
) -> PyTree:
    """Exchange blocks: block p along `split_axis` goes to rank p, and lands along `concat_axis`.

    The kernel reads and writes strided boxes, so XLA adds no transpose around it.

    Args:
      x: array or pytree of arrays of any dtype of at least 8 bits; all leaves travel together.
      axis_name: bound mesh axis, or a tuple of them (the first slowest).
      split_axis: axis cut into one block for each rank. Tiled: its size must divide by the number
        of ranks; untiled: its size must equal it, and the axis disappears.
      concat_axis: axis along which the received blocks lie, in rank order. Tiled: it grows by the
        number of ranks; untiled: a new axis of that size.
      axis_index_groups: groups of indices of the axis that exchange among themselves.
      tiled: see above.
      backend: "auto", "purlin" or "lax"; None takes the context or PURLIN_BACKEND.
      policy: a Policy or the name of a regime; None takes the context or PURLIN_POLICY.

    Returns:
      A pytree like `x`; equal, bit for bit, to jax.lax.all_to_all.

    Raises:
      NameError: the axis is not bound by a jax.shard_map around the call.
      ValueError: the axes or sizes do not fit.
      TypeError: a dtype of fewer than 4 bits.
    """
    joined = join("all_to_all", axis_name, axis_index_groups, backend, policy)
    leaves, tree = jax.tree.flatten(x)
    if not leaves or not joined.names:
        return x
    operands, axes, squeezed = [], [], []
    for leaf in map(jnp.asarray, leaves):
        split = _canonical_axis(joined.name, "split_axis", split_axis, leaf.ndim)
        concat = _canonical_axis(joined.name, "concat_axis", concat_axis, leaf.ndim)
        _check_split(joined, leaf.shape, split, tiled)
        if not tiled:
            # The axis that comes new is there from the start with size 1, and the one that goes
            # is left with size 1: reshapes, which move nothing.
            new = concat + (concat > split)
            leaf = jnp.expand_dims(leaf, new)
            split += new <= split
            concat = new
        operands.append(leaf)
        axes.append((split, concat))
        squeezed.append(split)
    moved = joined.run(operands, axes)
    if not tiled:
        moved = [jnp.squeeze(y, s) for y, s in zip(moved, squeezed, strict=True)]
    return jax.tree.unflatten(tree, moved)


def all_gather(
    x: PyTree,
    axis_name: groups_lib.AxisName,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    backend: str | None = None,
    policy: Policy | str | None = None,
) -> PyTree:
    """Gather the ranks' arrays on every rank.

    Args:
      x: array or pytree of arrays of any dtype of at least 8 bits; all leaves travel together.
      axis_name: bound mesh axis, or a tuple of them (the first slowest).
      axis_index_groups: groups of indices of the axis that gather among themselves.
      axis: where the ranks' arrays lie in the result, in rank order. Tiled: an axis of `x`, which
        grows by the number of ranks; untiled: a new axis of that size.
      tiled: see above.
      to: type of the result over the axis, as in jax.lax.all_gather: "varying", or "invarying" for
        one that out_specs may leave the axis out of, and whose gradient is the own block of the
        result's. "reduced" goes to jax.lax. Without check_vma, from jax 0.12 on, `to` says nothing.
      backend: "auto", "purlin" or "lax"; None takes the context or PURLIN_BACKEND.
      policy: a Policy or the name of a regime; None takes the context or PURLIN_POLICY.

    Returns:
      A pytree like `x`; equal, bit for bit, to jax.lax.all_gather.

    Raises:
      NameError: the axis is not bound by a jax.shard_map around the call.
      ValueError: no such axis.
      TypeError: a dtype of fewer than 4 bits.
    """
    joined = join("all_gather", axis_name, axis_index_groups, backend, policy)
    to = to if TO_WITHOUT_VMA or check_vma() else "varying"
    invariant = to == "invarying" and joined.groups is None
    if to != "varying" and not invariant:
        if joined.backend != "lax":
            fall_back(joined.op, f"to={to!r}", joined.backend, joined.site)
        with jax.named_scope(scope(joined.op, joined.site)):
            return jax.lax.all_gather(
                x, axis_name, axis_index_groups=axis_index_groups, axis=axis, tiled=tiled, to=to
            )
    leaves, tree = jax.tree.flatten(x)
    if not leaves:
        return x
    operands, axes = [], []
    for leaf in map(jnp.asarray, leaves):
        concat = _canonical_axis(joined.name, "axis", axis, leaf.ndim + (not tiled))
        operands.append(leaf if tiled else jnp.expand_dims(leaf, concat))
        axes.append((0, concat))
    moved = joined.run(operands, axes, invariant=invariant) if joined.names else operands
    return jax.tree.unflatten(tree, moved)


def reduce_scatter(
    x: PyTree,
    axis_name: groups_lib.AxisName,
    op: str = "sum",
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
    backend: str | None = None,
    policy: Policy | str | None = None,
) -> PyTree:
    """Reduce over ranks; rank p gets block p along `scatter_dimension` of the result.

    Values are folded in rank order, as in all_reduce.

    Args:
      x: array or pytree of arrays; leaves of one dtype travel together.
      axis_name: bound mesh axis, or a tuple of them.
      op: "sum", "prod", "max", "min", or for integers and booleans "and", "or", "xor".
      scatter_dimension: axis cut into one block for each rank. Tiled: its size must divide by the
        number of ranks; untiled: its size must equal it, and the axis disappears.
      axis_index_groups: groups of indices of the axis that reduce among themselves.
      tiled: see above.
      backend: "auto", "purlin" or "lax"; None takes the context or PURLIN_BACKEND.
      policy: a Policy or the name of a regime; None takes the context or PURLIN_POLICY.

    Returns:
      A pytree like `x`, as jax.lax.psum_scatter.

    Raises:
      NameError: the axis is not bound by a jax.shard_map around the call.
      ValueError: the axis or its size does not fit, or there is no such reduction.
      TypeError: a sum or product of booleans, or a dtype of fewer than 4 bits.
    """
    joined = join("reduce_scatter", axis_name, axis_index_groups, backend, policy, op)
    leaves, tree = jax.tree.flatten(x)
    if not leaves or not joined.names:
        return x
    operands, axes = [], []
    for leaf in map(jnp.asarray, leaves):
        split = _canonical_axis(joined.name, "scatter_dimension", scatter_dimension, leaf.ndim)
        _check_split(joined, leaf.shape, split, tiled)
        operands.append(leaf)
        axes.append((split, 0))
    moved = joined.run(operands, axes)
    if not tiled:
        moved = [jnp.squeeze(y, split) for y, (split, _) in zip(moved, axes, strict=True)]
    return jax.tree.unflatten(tree, moved)


def all_reduce(
    x: PyTree,
    axis_name: groups_lib.AxisName,
    op: str = "sum",
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    backend: str | None = None,
    policy: Policy | str | None = None,
) -> PyTree:
    """Reduce over ranks; every rank gets the same bits.

    Values are folded in rank order, starting from rank 0's, and rounded once: floats of 16 and 8
    bits in float32, other types in themselves. Integers wrap around.

    Args:
      x: array or pytree of arrays; leaves of one dtype travel together.
      axis_name: bound mesh axis, or a tuple of them.
      op: "sum", "prod", "max", "min", or for integers and booleans "and", "or", "xor".
      axis_index_groups: groups of indices of the axis that reduce among themselves.
      backend: "auto", "purlin" or "lax"; None takes the context or PURLIN_BACKEND.
      policy: a Policy or the name of a regime; None takes the context or PURLIN_POLICY.

    Returns:
      A pytree like `x`. Under check_vma the result is invariant over `axis_name`, as with
      jax.lax.psum.

    Raises:
      NameError: the axis is not bound by a jax.shard_map around the call.
      ValueError: no such reduction.
      TypeError: a sum or product of booleans, or a dtype of fewer than 4 bits.
    """
    joined = join("all_reduce", axis_name, axis_index_groups, backend, policy, op)
    leaves, tree = jax.tree.flatten(x)
    if not leaves or not joined.names:
        return x
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    # A vmap's axes are no mesh axes, over which JAX tracks what varies.
    typed = joined.groups is None and check_vma() and not groups_lib.vmapped(joined.names)
    moved = joined.run(arrays, [(0, 0)] * len(arrays), invariant=typed)
    return jax.tree.unflatten(tree, moved)
