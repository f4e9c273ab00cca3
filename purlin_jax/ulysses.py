"""Ulysses sequence parallelism: exchange sequence shards for head shards around attention.

Between devices each rank holds a shard of the sequence with all heads; inside attention it holds
the whole sequence with a shard of the heads (Jacobs et al., DeepSpeed-Ulysses, arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from purlin_jax import groups as groups_lib
from purlin_jax.collectives import all_to_all

_SEQUENCE_AND_HEADS = {"BSHD": (1, 2), "BHSD": (2, 1)}


def _axes(layout: str) -> tuple[int, int]:
    if layout not in _SEQUENCE_AND_HEADS:
        raise ValueError(f"purlin: layout {layout!r} is unknown; take 'BSHD' or 'BHSD'")
    return _SEQUENCE_AND_HEADS[layout]


def scatter_heads(
    *arrays: jax.Array,
    axis_name: groups_lib.AxisName,
    layout: str = "BSHD",
    backend: str | None = None,
) -> Any:
    """From a shard of the sequence with all heads to the whole sequence with a shard of the heads.

    Args:
      arrays: each [batch, sequence / P, heads, dim] (or BHSD), any dtype; all travel in one call.
        Their numbers of heads may differ, and each must divide by the P ranks.
      axis_name: mesh axis over which the sequence is sharded.
      layout: "BSHD" or "BHSD".
      backend: as in all_to_all.

    Returns:
      Each array as [batch, sequence, heads / P, dim] (or BHSD); one array for one argument, else a
      tuple.

    Raises:
      ValueError: heads that do not divide, or a wrong rank.
    """
    sequence, heads = _axes(layout)
    names = groups_lib.canonical_axes(axis_name)
    groups_lib.require_bound("scatter_heads", names)
    world = groups_lib.world_size(names, None)
    for x in arrays:
        if x.ndim != 4:
            raise ValueError(f"purlin.scatter_heads: {layout} has four axes, got shape {x.shape}")
        if x.shape[heads] % world:
            raise ValueError(
                f"purlin.scatter_heads: {x.shape[heads]} heads do not divide over {world} ranks; "
                f"shard the sequence over a divisor of {x.shape[heads]}, or pad the heads to "
                f"{-(-x.shape[heads] // world) * world}"
            )
    moved = all_to_all(arrays, axis_name, heads, sequence, tiled=True, backend=backend)
    return moved[0] if len(arrays) == 1 else moved


def gather_heads(
    *arrays: jax.Array,
    axis_name: groups_lib.AxisName,
    layout: str = "BSHD",
    backend: str | None = None,
) -> Any:
    """The inverse of scatter_heads: back to a shard of the sequence with all heads.

    Args:
      arrays: each [batch, sequence, heads / P, dim] (or BHSD); the sequence must divide by P.
      axis_name, layout, backend: as in scatter_heads.

    Returns:
      Each array as [batch, sequence / P, heads, dim] (or BHSD).
    """
    sequence, heads = _axes(layout)
    groups_lib.require_bound("gather_heads", groups_lib.canonical_axes(axis_name))
    moved = all_to_all(arrays, axis_name, sequence, heads, tiled=True, backend=backend)
    return moved[0] if len(arrays) == 1 else moved


def ulysses_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis_name: groups_lib.AxisName,
    mesh: Mesh | None = None,
    batch_axis: groups_lib.AxisName | None = None,
    layout: str = "BSHD",
    attn_fn: Callable[..., jax.Array] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Attention over a sequence that is sharded over `axis_name`.

    Inside jax.shard_map the arrays are local shards; with `mesh` they are global, the call wraps
    jax.shard_map itself and may stand in plain jit.

    Args:
      q: [batch, sequence / P, heads, dim] (or BHSD); heads must divide by the P ranks.
      k, v: the same with at most as many heads, which must divide by P too.
      axis_name: mesh axis over which the sequence is sharded.
      mesh: wraps jax.shard_map over this mesh.
      batch_axis: with `mesh`, the mesh axis over which the batch is sharded, if any.
      layout: "BSHD" or "BHSD", of arguments and result.
      attn_fn: attn_fn(q, k, v, **kwargs) on the whole sequence and the local heads, in `layout`;
        kwargs holds is_causal and scale where they are given. The default is
        jax.nn.dot_product_attention.
      is_causal: mask keys after the query.
      scale: of the logits; the default is 1 / sqrt(dim).
      backend: as in all_to_all.

    Returns:
      The attention output, shaped and sharded like `q`.

    Raises:
      ValueError: heads that do not divide; the message names the numbers and the remedies.
    """
    if mesh is not None:
        sequence, _ = _axes(layout)
        dims: list[Any] = [batch_axis, None, None, None]
        dims[sequence] = axis_name
        spec = PartitionSpec(*dims)

        def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return ulysses_attention(
                q,
                k,
                v,
                axis_name=axis_name,
                layout=layout,
                attn_fn=attn_fn,
                is_causal=is_causal,
                scale=scale,
                backend=backend,
            )

        if AxisType.Explicit in mesh.axis_types:  # shard_map never reshards those by itself
            q, k, v = (jax.reshard(x, NamedSharding(mesh, spec)) for x in (q, k, v))
        return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(q, k, v)

    kwargs: dict[str, Any] = {"is_causal": True} if is_causal else {}
    if scale is not None:
        kwargs["scale"] = scale
    with jax.named_scope("purlin/ulysses_attention"):
        q, k, v = scatter_heads(q, k, v, axis_name=axis_name, layout=layout, backend=backend)
        if attn_fn is not None:
            o = attn_fn(q, k, v, **kwargs)
        elif layout == "BSHD":
            o = jax.nn.dot_product_attention(q, k, v, **kwargs)
        else:
            o = jax.nn.dot_product_attention(
                *(x.swapaxes(1, 2) for x in (q, k, v)), **kwargs
            ).swapaxes(1, 2)
        return gather_heads(o, axis_name=axis_name, layout=layout, backend=backend)
