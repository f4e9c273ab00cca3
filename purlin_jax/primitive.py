"""The JAX primitive behind every collective, and its rules: types, derivatives, vmap.

One primitive serves all rows of the layout table. Its operands travel in one call; each has its own
split and concat axis, so that vmap only renumbers axes and never moves data.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from purlin_jax import _native, groups
from purlin_jax._compat import (
    AxisEffect,
    Primitive,
    ad,
    batching,
    check_vma,
    make_varying,
    result_aval,
    varying,
    zero_cotangent,
    zero_tangent,
)
from purlin_jax.policy import Policy


class Params(NamedTuple):
    """What is static about a call; hashable, so part of every cache key.

    Attributes:
      op: row of the layout table.
      reduce: reduction, empty for copies.
      axes: mesh axes that the collective joins, the first slowest.
      groups: axis_index_groups or None.
      world: ranks of one group.
      split, concat: for each operand, the input axis cut into blocks and the output axis along
        which blocks lie (ignored where the layout is packed).
      invariant: the result is typed as equal on all devices, and its cotangent is (all_reduce under
        check_vma, all_gather to "invarying").
      policy: what the caller forces.
      backend: "auto" or "purlin".
      site: file and line of the user's call, for reports.
      name: the function that the user has called, for errors and reports.
    """

    op: str
    reduce: str
    axes: tuple[Hashable, ...]
    groups: groups.Groups | None
    world: int
    split: tuple[int, ...]
    concat: tuple[int, ...]
    invariant: bool
    policy: Policy
    backend: str
    site: str
    name: str

    def select(self, keep: Sequence[int]) -> Params:
        """The same call with some of its operands."""
        return self._replace(
            split=tuple(self.split[i] for i in keep), concat=tuple(self.concat[i] for i in keep)
        )

    def transposed(self) -> Params:
        """The collective that carries cotangents: the row with input and output exchanged.

        What went to one peer in copies comes back as a sum, and the other way round.
        """
        op = transposed(self.op)
        reduces = _native.collectives[op]["consume"] == "reduce"
        return self._replace(
            op=op, reduce="sum" if reduces else "", split=self.concat, concat=self.split
        )


def is_split(layout: str) -> bool:
    return layout != "packed"


def transposed(op: str) -> str:
    """The row with input and output exchanged."""
    row = _native.collectives[op]
    return next(
        other
        for other, back in _native.collectives.items()
        if back["counted"] == row["counted"]
        and is_split(back["input"]) == is_split(row["output"])
        and is_split(back["output"]) == is_split(row["input"])
    )


collective_p = Primitive("purlin_collective")
collective_p.multiple_results = True


def bind(params: Params, operands: Sequence[Any]) -> list[Any]:
    return collective_p.bind(*operands, params=params)


@collective_p.def_impl
def _impl(*_: Any, params: Params) -> Any:
    raise NameError(f"purlin.{params.name} must be called inside jax.shard_map")


# Whether types of Python numbers, which give way to others, stay so: as in jax.lax, by check_vma.
_KEEP_WEAK_TYPES = {
    False: ("all_gather", "reduce_scatter"),
    True: ("all_gather", "reduce_scatter", "all_reduce"),
}


def _abstract_eval(*operands: Any, params: Params) -> Any:
    results = []
    for x, split, concat in zip(operands, params.split, params.concat, strict=True):
        try:
            shape = _native.result_shape(params.op, list(x.shape), params.world, split, concat)
        except ValueError as error:
            raise ValueError(f"purlin.{params.name} of {x.str_short()}: {error}") from None
        axes = varying(x) if check_vma() else frozenset()
        keeps_weak = params.op in _KEEP_WEAK_TYPES[check_vma()]
        if params.invariant:
            axes -= frozenset(params.axes)
        results.append(result_aval(x, shape, axes, weak=keeps_weak))
    return results, {AxisEffect(a) for a in params.axes}


collective_p.def_effectful_abstract_eval(_abstract_eval)


# Derivatives: copies and sums are linear in their operands.


def _jvp(primals: Any, tangents: Any, *, params: Params) -> Any:
    if params.reduce not in ("", "sum"):
        raise NotImplementedError(
            f"purlin.{params.name}: {params.reduce!r} has no derivative, as jax.lax.pmax has none"
        )
    out = bind(params, primals)
    alive = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    moved = iter(bind(params.select(alive), [tangents[i] for i in alive]) if alive else [])
    return out, [next(moved) if i in alive else zero_tangent(y) for i, y in enumerate(out)]


def _transpose(cotangents: Any, *operands: Any, params: Params) -> Any:
    alive = [i for i, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
    kept = params.select(alive)
    given = [cotangents[i] for i in alive]
    if params.invariant:  # the cotangent is the same on all ranks, and each contributed once
        moved = [
            _own_block(kept, make_varying(ct, params.axes), concat)
            for ct, concat in zip(given, kept.concat, strict=True)
        ]
    elif alive:
        moved = bind(kept.transposed(), given)
    else:
        moved = []
    found = iter(moved)
    return [
        next(found) if i in alive else (zero_cotangent(x) if ad.is_undefined_primal(x) else None)
        for i, x in enumerate(operands)
    ]


def _own_block(params: Params, x: Any, axis: int) -> Any:
    """What this rank has contributed to a result that is the same on all."""
    if not is_split(_native.collectives[params.op]["output"]):
        return x
    return groups.own_block(x, axis, params.axes, params.groups)


ad.primitive_jvps[collective_p] = _jvp
ad.primitive_transposes[collective_p] = _transpose


def _batch(axis_data: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    assert axis_data.name not in params.axes  # those go to jax.lax before they come here

    def shift(axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(a if d is None else a + (d <= a) for a, d in zip(axes, dims, strict=True))

    moved = params._replace(split=shift(params.split), concat=shift(params.concat))
    return bind(moved, operands), dims


batching.fancy_primitive_batchers[collective_p] = _batch
