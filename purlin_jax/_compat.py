"""Private JAX names, in one place: each is checked on jax 0.10, 0.11 and 0.12."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.extend.core
import jaxlib
import numpy as np
from jax._src import config as _config
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax.interpreters import ad, batching, mlir
from jaxlib import xla_client as _xla_client

Primitive = jax.extend.core.Primitive
ShapedArray = _core.ShapedArray
AxisEffect = _core.NamedAxisEffect
PARTITION_ID = ShapedArray((), np.dtype("int32"))
# Whether jax.lax.all_gather heeds `to` where varying axes are not tracked.
TO_WITHOUT_VMA = jax.__version_info__ < (0, 12)
__all__ = [
    "PARTITION_ID",
    "TO_WITHOUT_VMA",
    "AxisEffect",
    "Primitive",
    "ShapedArray",
    "ad",
    "batching",
    "mlir",
]


def zero_tangent(primal: Any) -> Any:
    """The symbolic zero tangent of a value."""
    return ad.Zero(_core.typeof(primal).to_tangent_aval())


def zero_cotangent(undefined: Any) -> Any:
    """The symbolic zero cotangent of an operand that is being transposed."""
    return ad.Zero(undefined.aval.to_ct_aval())


def axis_is_bound(name: Any) -> bool:
    return bool(_core.get_axis_env().axis_exists(name))


def check_vma() -> bool:
    """Whether varying axes are tracked where we are being traced."""
    return bool(_config._check_vma.value)


def varying(aval: Any) -> frozenset[Any]:
    """The manual mesh axes over which a value may differ between devices."""
    return frozenset(aval.mat.varying)


def make_varying(x: Any, axes: Sequence[Any]) -> Any:
    """`x`, typed as differing over `axes` too, as jax.lax does to the operand of a collective."""
    if not check_vma():
        return x
    missing = tuple(a for a in axes if a not in varying(_core.typeof(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def result_aval(
    operand: Any, shape: Sequence[int], varying_axes: frozenset[Any], *, weak: bool = False
) -> Any:
    """The type of a collective's result: the operand's with another shape and other axes.

    `weak`: a type that is weak, as that of a Python number, stays so.
    """
    mat = operand.mat.update(varying=varying_axes)
    return operand.update(
        shape=tuple(shape), weak_type=weak and operand.weak_type, manual_axis_type=mat
    )


def partition_id(ctx: Any) -> Any:
    """The device's number in the mesh as an s32 scalar, resolved by XLA when the program runs."""
    axis_context = ctx.module_context.axis_context
    if axis_context.manual_axes == frozenset(axis_context.mesh.axis_names):
        return _lower_partition_id(ctx)[0]

    # The partitioner refuses PartitionId where some axes are automatic: read it in a nested region
    # that is manual over all axes.
    def nested() -> list[Any]:
        region = jax.shard_map(
            _partition_id_p.bind, in_specs=(), out_specs=jax.P(), check_vma=False
        )
        return [region()]

    inner = ctx.replace(primitive=None, avals_in=[], avals_out=[PARTITION_ID])
    return mlir.lower_fun(nested, multiple_results=True)(inner)[0]


_partition_id_p = Primitive("purlin_partition_id")
_partition_id_p.def_abstract_eval(lambda: PARTITION_ID)


def _lower_partition_id(ctx: Any) -> Sequence[Any]:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    scalar = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))
    return [stablehlo.convert(scalar, stablehlo.partition_id())]


mlir.register_lowering(_partition_id_p, _lower_partition_id)


def mesh_of(ctx: Any) -> Any:
    """The mesh (concrete or abstract) that a collective is being lowered for."""
    return ctx.module_context.axis_context.mesh


def automatic_axes(ctx: Any) -> list[Any]:
    """The mesh axes of several devices over which XLA partitions what is being lowered."""
    axis_context = ctx.module_context.axis_context
    sizes = axis_context.mesh.shape
    return [a for a, size in sizes.items() if size > 1 and a not in axis_context.manual_axes]


def uses_shardy() -> bool:
    """Whether XLA partitions with Shardy, and not with the older GSPMD."""
    return bool(_config.use_shardy_partitioner.value)


def partitioned(ctx: Any) -> Any:
    """`ctx` for jax.experimental.custom_partitioning, where XLA partitions over some mesh axes.

    None where it leaves none to XLA; and for export, since XLA calls back into this process.
    """
    axis_context = ctx.module_context.axis_context
    mesh = axis_context.mesh
    if not automatic_axes(ctx) or for_export(ctx):
        return None
    if not isinstance(mesh, jax.sharding.Mesh):
        # Only their number matters: what is partitioned forgets the mesh.
        devices = jax.devices(ctx.module_context.platforms[0])
        if len(devices) < mesh.size:
            return None
        chosen = np.array(devices[: mesh.size]).reshape(mesh.axis_sizes)
        mesh = jax.sharding.Mesh(chosen, mesh.axis_names)
    known = dataclasses.replace(axis_context, mesh=mesh)
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=known))


def name_call(results: Sequence[Any], text: str) -> None:
    """Write `text` on a custom call of custom_partitioning, whose own text is only an address.

    JAX can be told to leave that address out of the key of its persistent cache.
    """
    from jaxlib.mlir import ir

    named: dict[str, Any] = {"purlin": ir.StringAttr.get(text)}
    results[0].owner.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(named)


def key_value_store() -> Any:
    """The store that the processes of jax.distributed share, or None."""
    return _distributed.global_state.client


def ordinal(ctx: Any) -> int:
    """A number that no other call of the module being lowered has, the same in all processes."""
    return int(ctx.module_context.new_channel())


def caches_programs() -> bool:
    """Whether JAX takes programs out of a cache on disk, where other processes may find others."""
    return _config.compilation_cache_dir.value is not None


def for_export(ctx: Any) -> bool:
    """Whether the program being lowered is for jax.export, to run on devices not known yet."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def accept_cpu_types() -> None:
    """Make XLA take FFI types of the CPU at once, also before there is a CPU backend.

    JAX does this itself with the backend, but only after it has handed over the targets that wait
    for it, and XLA refuses a target whose type it does not know.
    """
    _xla_client.register_custom_type_handler("cpu", _xla_client._xla.register_custom_type)


def runtime_ffi_api() -> tuple[int, int] | None:
    """(major, minor) of the FFI that the installed jaxlib speaks; None if its headers are gone."""
    header = Path(jaxlib.__file__).parent / "include/xla/ffi/api/c_api.h"
    if not header.is_file():
        return None
    text = header.read_text()
    numbers = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    return tuple(int(n.group(1)) for n in numbers) if all(numbers) else None  # type: ignore
