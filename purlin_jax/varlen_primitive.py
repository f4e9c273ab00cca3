"""The JAX primitive behind the collectives whose counts are data, and its rules.

Operands of one call share the counts, so they all have as many rows (leading axis). Counts are
arrays of one integer for each rank, and are not differentiated.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from purlin_jax import _native, groups, primitive
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

Matrix = tuple[tuple[int, ...], ...]


class CountedParams(NamedTuple):
    """What is static about a call; hashable, so part of every cache key.

    Attributes:
      op, reduce, axes, groups, world, policy, backend, site: as in primitive.Params.
      operands: number of arrays that are sent.
      capacity: rows of the results.
      known: the counts, [sender][receiver], where they are no data but known to all; and with
        them, in calls that are placed, the first rows at both.
      expects: whether the call brings the counts of what comes from each rank, to be checked.
      placed: whether it brings the first rows of what goes to each rank, there and here.
      keeps: whether it brings arrays of which results keep the rows that nobody writes.
      fill: whether rows that nobody writes are zero; undefined if neither this nor keeps.
    """

    op: str
    reduce: str
    axes: tuple[Hashable, ...]
    groups: groups.Groups | None
    world: int
    operands: int
    capacity: int
    known: tuple[Matrix, ...]
    expects: bool
    placed: bool
    keeps: bool
    fill: bool
    policy: Policy
    backend: str
    site: str
    name: str

    @property
    def most(self) -> int:
        """Rows that one rank sends another, at most; -1 where only the operands bound them."""
        return max(map(max, self.known[0])) if self.known else -1

    @property
    def split(self) -> tuple[int, ...]:
        """The axis of rows, for each operand."""
        return (0,) * self.operands

    @property
    def concat(self) -> tuple[int, ...]:
        return self.split

    def parts(self, operands: Sequence[Any]) -> Parts:
        """The operands of a call by their roles."""
        given = iter(operands)
        data = [next(given) for _ in range(self.operands)]
        sizes = next(given)
        expected = next(given) if self.expects else None
        places = (next(given), next(given)) if self.placed else None
        return Parts(data, sizes, expected, places, list(given))

    def transposed(self, rows: int) -> CountedParams:
        """The collective that carries cotangents back to operands of `rows` rows."""
        op = primitive.transposed(self.op)
        sizes, *places = (tuple(zip(*m, strict=True)) for m in self.known or ((),))
        reduces = _native.collectives[op]["consume"] == "reduce"
        return self._replace(
            op=op,
            reduce="sum" if reduces else "",
            capacity=rows,
            known=(sizes, *reversed(places)) if self.known else (),
            expects=True,
            keeps=False,
            fill=True,
        )


class Parts(NamedTuple):
    """The operands of a call: `places` are the first rows here and at each rank."""

    data: list[Any]
    sizes: Any
    expected: Any
    places: tuple[Any, Any] | None
    kept: list[Any]

    @property
    def counts(self) -> list[Any]:
        """Those that are counts, in order."""
        expected = [] if self.expected is None else [self.expected]
        return [self.sizes, *expected, *(self.places or ())]

    @property
    def operands(self) -> list[Any]:
        return [*self.data, *self.counts, *self.kept]


counted_p = Primitive("purlin_counted")
counted_p.multiple_results = True


def bind(params: CountedParams, parts: Parts) -> list[Any]:
    """The results of all operands, and the rows received from each rank."""
    return counted_p.bind(*parts.operands, params=params)


@counted_p.def_impl
def _impl(*_: Any, params: CountedParams) -> Any:
    raise NameError(f"purlin.{params.name} must be called inside jax.shard_map")


def _abstract_eval(*operands: Any, params: CountedParams) -> Any:
    parts = params.parts(operands)
    axes = frozenset().union(*(varying(x) for x in operands)) if check_vma() else frozenset()
    weak = params.op == "ppermute"  # as jax.lax's
    results = [result_aval(x, (params.capacity, *x.shape[1:]), axes, weak=weak) for x in parts.data]
    results.append(result_aval(parts.sizes, (params.world,), axes))
    return results, {AxisEffect(a) for a in params.axes}


counted_p.def_effectful_abstract_eval(_abstract_eval)


def from_peers(params: CountedParams, numbers: Any) -> Any:
    """What every rank has for this one, of an array with one number for each rank."""
    moved = primitive.Params(
        op="all_to_all",
        reduce="",
        axes=params.axes,
        groups=params.groups,
        world=params.world,
        split=(0,),
        concat=(0,),
        invariant=False,
        policy=Policy(),
        backend=params.backend,
        site=params.site,
        name=params.name,
    )
    return primitive.bind(moved, [numbers])[0]


def _exchanged(params: CountedParams, places: tuple[Any, Any]) -> tuple[Any, Any]:
    """The first rows at both sides, for what goes the other way."""
    if len(params.known) > 1:
        rank = groups.own_rank(params.axes, params.groups)
        _, starts, ends = (jnp.asarray(m, places[0].dtype)[:, rank] for m in params.known)
        return ends, starts
    return from_peers(params, places[1]), from_peers(params, places[0])


# Derivatives: copies and sums are linear in operands and kept arrays.


def _jvp(primals: Any, tangents: Any, *, params: CountedParams) -> Any:
    if params.reduce not in ("", "sum"):
        raise NotImplementedError(
            f"purlin.{params.name}: {params.reduce!r} has no derivative, as jax.lax.pmax has none"
        )
    out = counted_p.bind(*primals, params=params)
    parts = params.parts(primals)
    moving = params.parts(tangents)

    def is_zero(t: Any) -> bool:
        return type(t) is ad.Zero

    pairs = list(zip(moving.data, moving.kept or moving.data, strict=True))
    alive = [i for i, pair in enumerate(pairs) if not all(map(is_zero, pair))]
    moved: Any = iter(())
    if alive:
        kept = [ad.instantiate_zeros(moving.kept[i]) for i in alive] if params.keeps else []
        data = [ad.instantiate_zeros(moving.data[i]) for i in alive]
        data, kept = ([make_varying(t, params.axes) for t in ts] for ts in (data, kept))
        linear = params._replace(operands=len(alive), expects=True, fill=not params.keeps)
        known = Parts(data, parts.sizes, out[-1], parts.places, kept)
        moved = iter(bind(linear, known)[:-1])
    results = [next(moved) if i in alive else zero_tangent(y) for i, y in enumerate(out[:-1])]
    return out, [*results, zero_tangent(out[-1])]


def _transpose(cotangents: Any, *operands: Any, params: CountedParams) -> Any:
    parts = params.parts(operands)
    alive = [i for i, ct in enumerate(cotangents[:-1]) if type(ct) is not ad.Zero]
    data, kept = (
        [zero_cotangent(x) if ad.is_undefined_primal(x) else None for x in xs]
        for xs in (parts.data, parts.kept)
    )
    if alive:
        expected = parts.expected
        if expected is None:
            expected = from_peers(params, parts.sizes)
        places = parts.places
        if places is not None:
            places = _exchanged(params, places)
        undefined = [i for i in alive if data[i] is not None]
        if undefined:
            back = params.transposed(parts.data[undefined[0]].aval.shape[0])
            back = back._replace(operands=len(undefined))
            cts = [make_varying(cotangents[i], params.axes) for i in undefined]
            moved = bind(back, Parts(cts, expected, parts.sizes, places, []))
            data = [moved[undefined.index(i)] if i in undefined else d for i, d in enumerate(data)]
        for i in alive if params.keeps else ():
            assert places is not None
            ct = cotangents[i]
            kept[i] = jnp.where(_written(params, places[0], expected, ct), 0, ct)
    return [*data, *(None for _ in parts.counts), *kept]


def _written(params: CountedParams, begin: Any, rows: Any, result: Any) -> Any:
    """Which rows of `result` come from some rank, to be broadcast against it."""
    at = jnp.arange(params.capacity, dtype=rows.dtype)[:, None]
    hit = ((at >= begin) & (at < begin + rows)).any(1)
    return hit.reshape(-1, *(1 for _ in result.shape[1:]))


ad.primitive_jvps[counted_p] = _jvp
ad.primitive_transposes[counted_p] = _transpose


def _batch(axis_data: Any, operands: Any, dims: Any, *, params: CountedParams) -> Any:
    assert axis_data.name not in params.axes  # those go to jax.lax before they come here
    parts, where = params.parts(operands), params.parts(dims)
    if any(d is not None for d in where.counts):
        # Other counts for each element of the batch: one call after another.
        mapped = [
            jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True) if d is not None
        ]

        def one(elements: Sequence[Any]) -> Any:
            found = iter(elements)
            return counted_p.bind(
                *(x if d is None else next(found) for x, d in zip(operands, dims, strict=True)),
                params=params,
            )

        results = jax.lax.map(one, mapped)
        return results, [0] * len(results)

    # The same counts: rows that are longer.
    widen = partial(_behind_rows, axis_data.size)
    data, kept, batched = [], list(parts.kept), []
    for i, (x, d) in enumerate(zip(parts.data, where.data, strict=True)):
        here = d is not None or (params.keeps and where.kept[i] is not None)
        batched.append(1 if here else None)
        data.append(widen(x, d) if here else x)
        if params.keeps and here:
            kept[i] = widen(parts.kept[i], where.kept[i])
    return bind(params, parts._replace(data=data, kept=kept)), [*batched, None]


def _behind_rows(size: int, x: Any, dim: int | None) -> Any:
    """`x` with its batch behind the axis of rows."""
    if dim is None:
        return jnp.broadcast_to(x[:, None], (x.shape[0], size, *x.shape[1:]))
    return jnp.moveaxis(x, dim, 1)


batching.fancy_primitive_batchers[counted_p] = _batch

COUNT_DTYPES = (np.dtype("int32"), np.dtype("int64"))
