"""The same collectives by jax.lax, for platforms, groups and dtypes that are not purlin's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from purlin_jax.groups import own_block
from purlin_jax.primitive import Params

_REDUCTIONS = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}


def _all_reduce(params: Params, x: Any, names: Any) -> Any:
    if params.reduce in _REDUCTIONS:
        return _REDUCTIONS[params.reduce](x, names, axis_index_groups=params.groups)
    to = "invarying" if params.invariant else "varying"
    rows = jax.lax.all_gather(x, names, axis_index_groups=params.groups, to=to)
    fold = {
        "prod": jax.lax.mul,
        "and": jax.lax.bitwise_and,
        "or": jax.lax.bitwise_or,
        "xor": jax.lax.bitwise_xor,
    }[params.reduce]
    return functools.reduce(fold, [rows[r] for r in range(params.world)])


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
