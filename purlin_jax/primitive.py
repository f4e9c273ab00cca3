"""The JAX primitive behind every collective, and its rules: types, derivatives, vmap, lowering.

One primitive serves all rows of the layout table. Its operands travel in one call; each has its own
split and concat axis, so that vmap only renumbers axes and never moves data.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning

from purlin_jax import _native, domain, groups
from purlin_jax._compat import (
    PARTITION_ID,
    AxisEffect,
    Primitive,
    ShapedArray,
    ad,
    automatic_axes,
    batching,
    check_vma,
    for_export,
    make_varying,
    mesh_of,
    mlir,
    name_call,
    partition_id,
    partitioned,
    result_aval,
    uses_shardy,
    varying,
    zero_cotangent,
    zero_tangent,
)
from purlin_jax.backend import fall_back
from purlin_jax.policy import Policy, choose


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

    def select(self, keep: Sequence[int]) -> Params:
        """The same call with some of its operands."""
        return self._replace(
            split=tuple(self.split[i] for i in keep), concat=tuple(self.concat[i] for i in keep)
        )

    def transposed(self) -> Params:
        """The collective that carries cotangents: the row with input and output exchanged.

        What went to one peer in copies comes back as a sum, and the other way round.
        """
        op = _TRANSPOSED[self.op]
        reduces = _native.collectives[op]["consume"] == "reduce"
        return self._replace(
            op=op, reduce="sum" if reduces else "", split=self.concat, concat=self.split
        )


def _is_split(layout: str) -> bool:
    return layout != "packed"


_TRANSPOSED = {
    op: next(
        other
        for other, back in _native.collectives.items()
        if _is_split(back["input"]) == _is_split(row["output"])
        and _is_split(back["output"]) == _is_split(row["input"])
    )
    for op, row in _native.collectives.items()
}

collective_p = Primitive("purlin_collective")
collective_p.multiple_results = True


def bind(params: Params, operands: Sequence[Any]) -> list[Any]:
    return collective_p.bind(*operands, params=params)


@collective_p.def_impl
def _impl(*_: Any, params: Params) -> Any:
    raise NameError(f"purlin.{params.op} must be called inside jax.shard_map")


def _abstract_eval(*operands: Any, params: Params) -> Any:
    results = []
    for x, split, concat in zip(operands, params.split, params.concat, strict=True):
        try:
            shape = _native.result_shape(params.op, list(x.shape), params.world, split, concat)
        except ValueError as error:
            raise ValueError(f"purlin.{params.op} of {x.str_short()}: {error}") from None
        axes = varying(x) if check_vma() else frozenset()
        if params.invariant:
            axes -= frozenset(params.axes)
        results.append(result_aval(x, shape, axes))
    return results, {AxisEffect(a) for a in params.axes}


collective_p.def_effectful_abstract_eval(_abstract_eval)


# Derivatives: copies and sums are linear in their operands.


def _jvp(primals: Any, tangents: Any, *, params: Params) -> Any:
    if params.reduce not in ("", "sum"):
        raise NotImplementedError(
            f"purlin.{params.op} with {params.reduce!r} has no derivative, as jax.lax.pmax has none"
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
    if not _is_split(_native.collectives[params.op]["output"]):
        return x
    size = x.shape[axis] // params.world
    return jax.lax.dynamic_slice_in_dim(x, _rank(params) * size, size, axis)


def _rank(params: Params) -> Any:
    """This rank's number in its group."""
    index = jax.lax.axis_index(params.axes)
    if params.groups is None:
        return index
    within = {i: r for group in params.groups for r, i in enumerate(group)}
    return jax.numpy.asarray([within[i] for i in range(len(within))])[index]


ad.primitive_jvps[collective_p] = _jvp
ad.primitive_transposes[collective_p] = _transpose


def _batch(axis_data: Any, operands: Any, dims: Any, *, params: Params) -> Any:
    assert axis_data.name not in params.axes  # those go to jax.lax before they come here

    def shift(axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(a if d is None else a + (d <= a) for a, d in zip(axes, dims, strict=True))

    moved = params._replace(split=shift(params.split), concat=shift(params.concat))
    return bind(moved, operands), dims


batching.fancy_primitive_batchers[collective_p] = _batch


# Lowering.

_LAX_REDUCTIONS = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}


def _lax_all_reduce(params: Params, x: Any, names: Any) -> Any:
    if params.reduce in _LAX_REDUCTIONS:
        return _LAX_REDUCTIONS[params.reduce](x, names, axis_index_groups=params.groups)
    to = "invarying" if params.invariant else "varying"
    rows = jax.lax.all_gather(x, names, axis_index_groups=params.groups, to=to)
    fold = {
        "prod": jax.lax.mul,
        "and": jax.lax.bitwise_and,
        "or": jax.lax.bitwise_or,
        "xor": jax.lax.bitwise_xor,
    }[params.reduce]
    return functools.reduce(fold, [rows[r] for r in range(params.world)])


def _lax_reduce_scatter(params: Params, x: Any, names: Any, axis: int) -> Any:
    if params.reduce == "sum":
        return jax.lax.psum_scatter(
            x, names, scatter_dimension=axis, axis_index_groups=params.groups, tiled=True
        )
    total = _lax_all_reduce(params._replace(invariant=False), x, names)
    size = x.shape[axis] // params.world
    return jax.lax.dynamic_slice_in_dim(total, _rank(params) * size, size, axis)


def lax_equivalent(params: Params, operands: Sequence[Any]) -> list[Any]:
    """The same collective by jax.lax, for platforms and groups that are not ours."""
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
            y = _lax_reduce_scatter(params, x, names, split)
        else:
            y = _lax_all_reduce(params, x, names)
        results.append(y)
    return results


def _lower_to_lax(reason: str) -> Any:
    def rule(ctx: Any, *operands: Any, params: Params) -> Any:
        fall_back(params.op, reason, params.backend, params.site)
        plain = mlir.lower_fun(lambda *xs: lax_equivalent(params, xs), multiple_results=True)
        return plain(ctx, *operands)

    return rule


def _in_place(platform: str, op: str, regime: str) -> bool:
    """Whether results are declared to lie where operands did, which XLA copies if needed later.

    Not on GPUs, where only small arrays take a regime that allows it: a copy would cost more than
    their memory is worth.
    """
    return platform == "cpu" and op in _native.regimes[regime][1]


def _lower(platform: str) -> Any:
    def rule(ctx: Any, *operands: Any, params: Params) -> Any:
        mesh = mesh_of(ctx)
        dtype = ctx.avals_in[0].dtype.name
        reason = domain.refusal(platform, mesh, params.reduce, dtype, for_export(ctx))
        if reason is None and automatic_axes(ctx) and not uses_shardy():
            # XLA would end the process.
            reason = f"GSPMD takes no custom call beside automatic axes {automatic_axes(ctx)}"
        if reason is not None:
            return _lower_to_lax(reason)(ctx, *operands, params=params)
        domain.ensure_started(platform)
        attributes = _attributes(platform, mesh, params, ctx.avals_in)
        call = _Call(params, attributes, _in_place(platform, params.op, attributes["regime"]))
        operands = (partition_id(ctx), *operands)
        avals = [PARTITION_ID, *ctx.avals_in]
        outer = partitioned(ctx)
        if outer is None:
            return _lower_call(ctx.replace(avals_in=avals), *operands, call=call)
        local = mlir.lower_fun(_along_automatic_axes(call), multiple_results=True)
        results = local(outer.replace(avals_in=avals), *operands)
        name_call(results, repr(attributes))
        return results

    return rule


@dataclass(frozen=True, eq=False)
class _Call:
    """A custom call whose attributes are known, and the mesh forgotten; equal only to itself."""

    params: Params
    attributes: dict[str, Any]
    in_place: bool


def _lower_call(ctx: Any, *operands: Any, call: _Call) -> Any:
    # Row-major layouts for all, which plans assume, are the default. Operand 0 is the partition id.
    aliases = {i: i - 1 for i in range(1, len(operands))} if call.in_place else None
    target = jax.ffi.ffi_lowering(domain.TARGET, operand_output_aliases=aliases)
    return target(ctx, *operands, **call.attributes)


_call_p = Primitive("purlin_call")
_call_p.multiple_results = True
mlir.register_lowering(_call_p, _lower_call)


@_call_p.def_abstract_eval
def _(_: Any, *operands: Any, call: _Call) -> Any:
    params = call.params
    return [
        ShapedArray(_native.result_shape(params.op, list(x.shape), params.world, s, c), x.dtype)
        for x, s, c in zip(operands, params.split, params.concat, strict=True)
    ]


def _along_automatic_axes(call: _Call) -> Any:
    """The call on what each device holds, in a shard_map that leaves mesh axes to XLA.

    Unless told, XLA gathers an array over those axes for a custom call. A collective works on
    any part of its operands that holds the axes which it cuts or joins as a whole.
    """
    params = call.params
    reduces_whole = params.op == "all_reduce"

    def fixed(i: int) -> set[int]:
        return set() if reduces_whole else {params.split[i], params.concat[i]}

    @custom_partitioning
    def whole(partition: Any, *operands: Any) -> Any:
        return _call_p.bind(partition, *operands, call=call)

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        number, *operands = (x.sharding for x in arguments)
        for i, x in enumerate(arguments[1:]):
            held = x.sharding.shard_shape(x.shape)
            if any(held[axis] != x.shape[axis] for axis in fixed(i)):
                operands[i] = number  # which lies whole on every device
        return mesh, whole.fun, list(operands), (number, *operands)

    def factors(i: int, ndim: int, side: str) -> str:
        return " ".join(f"{side if d in fixed(i) else 'x'}{i}d{d}" for d in range(ndim))

    def run(number: Any, *operands: Any) -> Any:
        inputs = ", ".join(["", *(factors(i, x.ndim, "i") for i, x in enumerate(operands))])
        outputs = ", ".join(factors(i, x.ndim, "o") for i, x in enumerate(operands))
        whole.def_partition(
            partition, sharding_rule=f"{inputs} -> {outputs}", decode_shardings=False
        )
        return whole(number, *operands)

    return run


def _attributes(platform: str, mesh: Any, params: Params, avals: Sequence[Any]) -> dict[str, Any]:
    """What the handler reads; ffi/xla/site.h is its other side."""
    pair_bytes = sum(
        _native.plan(params.op, list(x.shape), x.dtype.itemsize, params.world, s, c)["bytes"]
        for x, s, c in zip(avals, params.split, params.concat, strict=True)
    )
    choice = choose(params.policy, params.op, domain.arch(platform, mesh), params.world, pair_bytes)
    return {
        "op": params.op,
        "reduce": params.reduce,
        "dtype": avals[0].dtype.name if params.reduce else "",
        "regime": choice.regime,
        "atom": choice.atom,
        "blocks": np.int64(choice.blocks),
        "threads": np.int64(choice.threads),
        "staging_bytes": np.int64(choice.staging_bytes),
        "world": np.int64(params.world),
        "groups": groups.partition(mesh, params.axes, params.groups).ravel(),
        "devices": np.asarray([] if platform == "cpu" else domain.ordinals(mesh), np.int64),
        "split": np.asarray(params.split, np.int64),
        "concat": np.asarray(params.concat, np.int64),
        "tag": np.int64(_tag(params, avals)),
        "site": params.site,
    }


def _tag(params: Params, avals: Sequence[Any]) -> int:
    """A number that ranks compare so as not to exchange data of different calls; never 0.

    It depends on nothing but the call, so that compilation caches find the program again.
    """
    text = repr((params, [(x.shape, x.dtype.name) for x in avals]))
    return zlib.crc32(text.encode()) % 0xFFFF + 1


mlir.register_lowering(collective_p, _lower("cpu"), platform="cpu")
mlir.register_lowering(collective_p, _lower("cuda"), platform="cuda")
mlir.register_lowering(collective_p, _lower_to_lax("this platform has no purlin kernels"))
