"""The same collectives by jax.lax, for platforms, groups and dtypes that are not purlin's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from purlin_jax import _native
from purlin_jax.groups import own_block, own_rank
from purlin_jax.primitive import Params, is_split
from purlin_jax.varlen_primitive import CountedParams

_REDUCTIONS = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}
_FOLDS = {
    "sum": jax.lax.add,
    "prod": jax.lax.mul,
    "max": jax.lax.max,
    "min": jax.lax.min,
    "and": jax.lax.bitwise_and,
    "or": jax.lax.bitwise_or,
    "xor": jax.lax.bitwise_xor,
}


def _all_reduce(params: Params, x: Any, names: Any) -> Any:
    if params.reduce in _REDUCTIONS:
        return _REDUCTIONS[params.reduce](x, names, axis_index_groups=params.groups)
    to = "invarying" if params.invariant else "varying"
    rows = jax.lax.all_gather(x, names, axis_index_groups=params.groups, to=to)
    return functools.reduce(_FOLDS[params.reduce], [rows[r] for r in range(params.world)])


def _reduce_scatter(params: Params, x: Any, names: Any, axis: int) -> Any:
    if params.reduce == "sum":
        return jax.lax.psum_scatter(
            x, names, scatter_dimension=axis, axis_index_groups=params.groups, tiled=True
        )
    total = _all_reduce(params._replace(invariant=False), x, names)
    return own_block(total, axis, params.axes, params.groups)


def lax_equivalent(params: Params, operands: Sequence[Any]) -> list[Any]:
    """What jax.lax makes of the call."""
    names = params.axes if len(params.axes) > 1 else params.axes[0]
    results = []
    for x, split, concat in zip(operands, params.split, params.concat, strict=True):
        if params.op == "all_to_all":
            y = jax.lax.all_to_all(
                x, names, split, concat, axis_index_groups=params.groups, tiled=True
            )
        elif params.op == "all_gather":
            to = "invarying" if params.invariant else "varying"
            y = jax.lax.all_gather(
                x, names, axis_index_groups=params.groups, axis=concat, tiled=True, to=to
            )
        elif params.op == "reduce_scatter":
            y = _reduce_scatter(params, x, names, split)
        else:
            y = _all_reduce(params, x, names)
        results.append(y)
    return results


def counted_equivalent(params: CountedParams, operands: Sequence[Any]) -> list[Any]:
    """What jax.lax makes of a call whose counts are data: every rank gets all rows of all others.

    Wrong counts are not noticed: rows outside of an array are those at its end.
    """
    names = params.axes if len(params.axes) > 1 else params.axes[0]

    def gather(x: Any) -> Any:
        # Tiled, since the other form takes neither PRNG keys nor symbolic shapes.
        return jax.lax.all_gather(x[None], names, axis_index_groups=params.groups, tiled=True)

    parts = params.parts(operands)
    if params.op == "ppermute" and params.known:
        perm = [(s, d) for s, row in enumerate(params.known[0]) for d, n in enumerate(row) if n]
        moved = [jax.lax.ppermute(x, names, perm) for x in parts.data]
        received = jnp.asarray(params.known[0], parts.sizes.dtype)[:, own_rank(params.axes, None)]
        return [*moved, received]
    rank = own_rank(params.axes, params.groups)
    row = _native.collectives[params.op]
    sizes = gather(parts.sizes)  # [sender, receiver]
    received = sizes[:, rank]
    if parts.places is not None:
        send_at, receive_at = (gather(place)[:, rank] for place in parts.places)
    else:
        packed = jnp.zeros_like(received)
        send_at = (jnp.cumsum(sizes, 1) - sizes)[:, rank] if is_split(row["input"]) else packed
        split = is_split(row["output"])
        receive_at = jnp.cumsum(received) - received if split else packed
    at = jnp.arange(params.capacity, dtype=sizes.dtype)
    within = at - receive_at[:, None]  # [sender, row of the result]
    valid = (within >= 0) & (within < received[:, None])

    results = []
    for i, x in enumerate(parts.data):
        everyone = gather(x)
        result = parts.kept[i] if params.keeps else None
        for q in range(params.world):
            mine = valid[q].reshape(-1, *(1 for _ in x.shape[1:]))
            if x.shape[0] > 0:
                rows = jnp.take(everyone[q], within[q] + send_at[q], axis=0, mode="clip")
            else:
                rows = jnp.zeros((params.capacity, *x.shape[1:]), x.dtype)
            if result is None:
                result = jnp.where(mine, rows, jnp.zeros_like(rows))
            elif params.reduce:
                result = jnp.where(mine, _FOLDS[params.reduce](result, rows), result)
            elif params.placed and not params.keeps:
                # Cotangents, on their way back: rows that went to several ranks get a sum.
                result = result + jnp.where(mine, rows, jnp.zeros_like(rows))
            else:
                result = jnp.where(mine, rows, result)
        results.append(result)
    return [*results, received]
