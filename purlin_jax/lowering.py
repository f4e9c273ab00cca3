"""How the primitive becomes a custom call of XLA, or what jax.lax makes of it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning

from purlin_jax import _native, domain, groups, hosts
from purlin_jax._compat import (
    PARTITION_ID,
    Primitive,
    ShapedArray,
    automatic_axes,
    caches_programs,
    for_export,
    mesh_of,
    mlir,
    name_call,
    ordinal,
    partition_id,
    partitioned,
    uses_shardy,
)
from purlin_jax.backend import fall_back
from purlin_jax.lax_forms import counted_equivalent, lax_equivalent
from purlin_jax.policy import Policy, Traffic, choose
from purlin_jax.primitive import Params, collective_p
from purlin_jax.varlen_primitive import CountedParams, counted_p


def _lower_to_lax(reason: str) -> Any:
    def rule(ctx: Any, *operands: Any, params: Params | CountedParams) -> Any:
        fall_back(params.op, reason, params.backend, params.site)
        plain = mlir.lower_fun(lambda *xs: _lax_form(params, xs), multiple_results=True)
        return plain(ctx, *operands)

    return rule


def _over_hosts(
    ctx: Any, operands: Sequence[Any], params: Params | CountedParams, placed: np.ndarray
) -> Any:
    """A collective whose groups leave their hosts."""
    parts = hosts.split(mesh_of(ctx), params.axes, placed)
    if isinstance(params, CountedParams) or params.groups is not None:
        reason = "a group leaves its host"
    elif parts is None or not parts.inner:
        reason = f"axes {params.axes} lead to other hosts"
    else:
        rule = mlir.lower_fun(lambda *xs: hosts.composed(params, parts, xs), multiple_results=True)
        return rule(ctx, *operands)
    return _lower_to_lax(reason)(ctx, *operands, params=params)


def _lax_form(params: Params | CountedParams, operands: Sequence[Any]) -> list[Any]:
    if isinstance(params, CountedParams):
        return counted_equivalent(params, operands)
    return lax_equivalent(params, operands)


def _is_nothing(params: Params | CountedParams) -> bool:
    """Whether a call gives its operands back: that of a single rank, unless something is forced.

    PURLIN_SINGLE=call makes it a call like others, for tests and measurements on one device.
    """
    alone = params.world == 1 and isinstance(params, Params) and params.policy == Policy()
    return alone and os.environ.get("PURLIN_SINGLE") != "call"


def _in_place(platform: str, op: str, regime: str) -> bool:
    """Whether results are declared to lie where operands did, which XLA copies if needed later.

    Not on GPUs, where only small arrays take a regime that allows it: a copy would cost more than
    their memory is worth.
    """
    return platform == "cpu" and op in _native.regimes[regime][1]


def _lower(platform: str) -> Any:
    def rule(ctx: Any, *operands: Any, params: Params | CountedParams) -> Any:
        if _is_nothing(params):
            return list(operands)
        mesh = mesh_of(ctx)
        dtype = ctx.avals_in[0].dtype.name
        reason = domain.refusal(platform, mesh, params.reduce, dtype, for_export(ctx))
        if reason is None and automatic_axes(ctx) and not uses_shardy():
            # XLA would end the process.
            reason = f"GSPMD takes no custom call beside automatic axes {automatic_axes(ctx)}"
        if reason is None and automatic_axes(ctx) and isinstance(params, CountedParams):
            reason = f"counts are not split over automatic axes {automatic_axes(ctx)}"
        if reason is None:
            partition = groups.partition(mesh, params.axes, params.groups)
            placed = domain.hosts_of(mesh)
            if placed is not None and not hosts.keeps_to_them(placed, partition):
                return _over_hosts(ctx, operands, params, placed)
            reason = domain.no_window(platform, mesh, partition)
        if reason is not None:
            return _lower_to_lax(reason)(ctx, *operands, params=params)
        domain.ensure_started(platform, joined=domain.spans_processes(mesh))
        attributes = _attributes(platform, ctx, params, ctx.avals_in)
        call = _Call(params, attributes, _in_place(platform, params.op, attributes["regime"]))
        operands = (partition_id(ctx), *operands)
        avals = [PARTITION_ID, *ctx.avals_in]
        outer = None if isinstance(params, CountedParams) else partitioned(ctx)
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

    params: Params | CountedParams
    attributes: dict[str, Any]
    in_place: bool

    def aliases(self, operands: int) -> dict[int, int] | None:
        """Which operands the results may lie in. Operand 0 is the partition id."""
        if isinstance(self.params, CountedParams):
            n = self.params.operands if self.params.keeps else 0
            return {operands - n + i: i for i in range(n)}
        return {i: i - 1 for i in range(1, operands)} if self.in_place else None


def _lower_call(ctx: Any, *operands: Any, call: _Call) -> Any:
    # Row-major layouts for all, which plans assume, are the default.
    aliases = call.aliases(len(operands))
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


def _most_rows(params: Params | CountedParams, x: Any) -> list[int]:
    """Shape of an operand; of what one rank sends another at most, where counts are data."""
    if isinstance(params, CountedParams) and params.most >= 0:
        return [min(params.most, x.shape[0]), *x.shape[1:]]
    return list(x.shape)


def _begin(ctx: Any, site: str, tag: int) -> int:
    """A number of the call in its module that is the same in all processes."""
    number = ordinal(ctx)
    _native.begin_call(number, site, tag, caches_programs())
    return number


def _about_counts(params: Params | CountedParams) -> dict[str, np.int64]:
    names = ("expects", "placed", "keeps", "fill")
    if not isinstance(params, CountedParams):
        return {"most": np.int64(-1), **dict.fromkeys(names, np.int64(0))}
    return {name: np.int64(getattr(params, name)) for name in ("most", *names)}


def _attributes(
    platform: str, ctx: Any, params: Params | CountedParams, avals: Sequence[Any]
) -> dict[str, Any]:
    """What the handler reads; ffi/xla/site.h is its other side."""
    counted = isinstance(params, CountedParams)
    mesh = mesh_of(ctx)
    processes = domain.processes_of(mesh)
    names_devices = platform == "cuda" or bool(processes)  # whoever shares windows with others
    tag = _tag(params, avals)
    site = params.site if params.name == params.op else f"{params.site} ({params.name})"
    plans = [
        _native.plan(params.op, _most_rows(params, x), x.dtype.itemsize, params.world, s, c)
        for x, s, c in zip(avals, params.split, params.concat, strict=not counted)
    ]
    item_bytes = avals[0].dtype.itemsize if params.reduce else 1
    capacity = domain.capacity(platform, params.world)
    traffic = Traffic.of(plans, item_bytes, capacity, lends=domain.lends(platform, mesh))
    choice = choose(params.policy, params.op, domain.arch(platform, mesh), params.world, traffic)
    return {
        "op": params.op,
        "reduce": params.reduce,
        "dtype": avals[0].dtype.name if params.reduce else "",
        "regime": choice.regime,
        "atom": domain.atom(platform, choice.atom, bool(params.policy.atom)),
        "blocks": np.int64(choice.blocks),
        "threads": np.int64(choice.threads),
        "depth": np.int64(choice.depth),
        "staging_bytes": np.int64(choice.staging_bytes),
        "packet_bytes": np.int64(choice.packet_bytes),
        "world": np.int64(params.world),
        "processes": np.asarray(processes, np.int64),
        "ordinal": np.int64(_begin(ctx, site, tag) if processes and platform == "cpu" else 0),
        "operands": ", ".join(x.str_short() for x in avals[: len(params.split)]),
        "groups": groups.partition(mesh, params.axes, params.groups).ravel(),
        "devices": np.asarray(domain.device_ids(mesh) if names_devices else [], np.int64),
        "split": np.asarray(params.split, np.int64),
        "concat": np.asarray(params.concat, np.int64),
        **_about_counts(params),
        "tag": np.int64(tag),
        "site": site,
    }


def _tag(params: Params | CountedParams, avals: Sequence[Any]) -> int:
    """A number that ranks compare so as not to exchange data of different calls; never 0.

    It depends on nothing but the call, so that compilation caches find the program again.
    """
    text = repr((params, [(x.shape, x.dtype.name) for x in avals]))
    return zlib.crc32(text.encode()) % 0xFFFF + 1


def register() -> None:
    """Tell JAX how to lower the primitive on each platform."""
    for platform in ("cpu", "cuda"):
        for p in (collective_p, counted_p):
            mlir.register_lowering(p, _lower(platform), platform=platform)
    for p in (collective_p, counted_p):
        mlir.register_lowering(p, _lower_to_lax("this platform has no purlin kernels"))
