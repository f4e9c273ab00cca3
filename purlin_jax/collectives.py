"""The collectives that users call inside jax.shard_map, with the semantics of jax.lax."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from purlin_jax import _native, primitive
from purlin_jax import groups as groups_lib
from purlin_jax._compat import check_vma, make_varying
from purlin_jax.backend import fall_back, refusal, resolve
from purlin_jax.policy import current as current_policy

PyTree = Any
_PACKAGE = Path(__file__).parent


def _run(
    op: str,
    leaves: Sequence[jax.Array],
    axis_name: groups_lib.AxisName,
    axis_index_groups: Any,
    backend: str | None,
    *,
    axes: Sequence[tuple[int, int]],
    reduce: str = "",
) -> list[jax.Array]:
    """Send canonical operands through the primitive, several in one call where types allow."""
    names = groups_lib.canonical_axes(axis_name)
    size = groups_lib.world_size(names, None)
    groups = groups_lib.canonical_groups(op, axis_index_groups, size)
    chosen = resolve(backend)
    params = primitive.Params(
        op=op,
        reduce=reduce,
        axes=names,
        groups=groups,
        world=groups_lib.world_size(names, groups),
        split=tuple(split for split, _ in axes),
        concat=tuple(concat for _, concat in axes),
        invariant=op == "all_reduce" and groups is None and check_vma(),
        policy=current_policy(),
        backend=chosen,
        site=_call_site(),
    )
    with jax.named_scope(f"purlin/{op}"):
        if chosen == "lax":
            return primitive.lax_equivalent(params, leaves)
        reason = refusal(op, reduce, [jax.typeof(x) for x in leaves], params.world)
        if reason is not None:
            fall_back(op, reason, chosen)
            return primitive.lax_equivalent(params, leaves)
        leaves = [make_varying(x, names) for x in leaves]
        results: dict[int, jax.Array] = {}
        for batch in _batches(leaves, same_dtype=bool(reduce)):
            out = primitive.bind(params.select(batch), [leaves[i] for i in batch])
            results.update(zip(batch, out, strict=True))
    return [results[i] for i in range(len(leaves))]


def _call_site() -> str:
    """file.py:line of the first caller outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).parent == _PACKAGE:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _batches(leaves: Sequence[jax.Array], *, same_dtype: bool) -> list[list[int]]:
    """Operands that may travel in one call: at most _native.max_operands, one dtype to reduce."""
    by_key: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        vma = getattr(jax.typeof(x), "vma", None)
        by_key.setdefault((x.dtype if same_dtype else None, vma), []).append(i)
    step = _native.max_operands
    return [
        members[at : at + step]
        for members in by_key.values()
        for at in range(0, len(members), step)
    ]


def _canonical_axis(op: str, what: str, axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise ValueError(f"purlin.{op}: {what}={axis} is outside an array of rank {rank}")
    return axis % rank


def all_to_all(
    x: PyTree,
    axis_name: groups_lib.AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
    backend: str | None = None,
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

    Returns:
      A pytree like `x`; equal, bit for bit, to jax.lax.all_to_all.

    Raises:
      NameError: the axis is not bound by a jax.shard_map around the call.
      ValueError: the axes or sizes do not fit.
    """
    op = "all_to_all"
    names = groups_lib.canonical_axes(axis_name)
    groups_lib.require_mesh_axes(op, names)
    leaves, tree = jax.tree.flatten(x)
    if not leaves or not names:
        return x
    size = groups_lib.world_size(names, None)
    world = groups_lib.world_size(names, groups_lib.canonical_groups(op, axis_index_groups, size))
    operands, axes, squeezed = [], [], []
    for leaf in map(jnp.asarray, leaves):
        split = _canonical_axis(op, "split_axis", split_axis, leaf.ndim)
        concat = _canonical_axis(op, "concat_axis", concat_axis, leaf.ndim)
        if tiled and leaf.shape[split] % world:
            raise ValueError(
                f"purlin.all_to_all: axis {split} of {leaf.shape} does not divide over {world} "
                f"ranks; pad it to {-(-leaf.shape[split] // world) * world}"
            )
        if not tiled:
            if leaf.shape[split] != world:
                raise ValueError(
                    f"purlin.all_to_all: untiled, axis {split} of {leaf.shape} must have the size "
                    f"{world} of the axis; pass tiled=True to cut a longer one"
                )
            # The axis that comes new is there from the start with size 1, and the one that goes
            # is left with size 1: reshapes, which move nothing.
            new = concat + (concat > split)
            leaf = jnp.expand_dims(leaf, new)
            split += new <= split
            concat = new
        operands.append(leaf)
        axes.append((split, concat))
        squeezed.append(split)
    moved = _run(op, operands, axis_name, axis_index_groups, backend, axes=axes)
    if not tiled:
        moved = [jnp.squeeze(y, s) for y, s in zip(moved, squeezed, strict=True)]
    return jax.tree.unflatten(tree, moved)


def all_reduce(
    x: PyTree,
    axis_name: groups_lib.AxisName,
    op: str = "sum",
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    backend: str | None = None,
) -> PyTree:
    """Reduce over ranks; every rank gets the same bits.

    Values are folded in rank order, starting from rank 0's, in float32, and rounded once.

    Args:
      x: array or pytree of arrays, float32 or bfloat16; leaves of one dtype travel together.
      axis_name: bound mesh axis, or a tuple of them.
      op: "sum".
      axis_index_groups: groups of indices of the axis that reduce among themselves.
      backend: "auto", "purlin" or "lax"; None takes the context or PURLIN_BACKEND.

    Returns:
      A pytree like `x`. Under check_vma the result is invariant over `axis_name`, as with
      jax.lax.psum.

    Raises:
      NameError: the axis is not bound by a jax.shard_map around the call.
      ValueError: no such reduction.
    """
    names = groups_lib.canonical_axes(axis_name)
    groups_lib.require_mesh_axes("all_reduce", names)
    if op not in _native.reductions:
        raise ValueError(
            f"purlin.all_reduce: no reduction {op!r}; take one of {_native.reductions}"
        )
    leaves, tree = jax.tree.flatten(x)
    if not leaves or not names:
        return x
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    none = [(0, 0)] * len(arrays)
    moved = _run("all_reduce", arrays, axis_name, axis_index_groups, backend, axes=none, reduce=op)
    return jax.tree.unflatten(tree, moved)
