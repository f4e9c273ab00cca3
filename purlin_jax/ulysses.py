"""Ulysses sequence parallelism: exchange sequence shards for head shards around attention.

Between devices each rank holds a shard of the sequence with all heads; inside attention it holds
the whole sequence with a shard of the heads (Jacobs et al., DeepSpeed-Ulysses, arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from purlin_jax import groups as groups_lib
from purlin_jax.collectives import all_to_all
from purlin_jax.heads import HeadPlan, plan_heads
from purlin_jax.joint import Joint, all_heads

_SEQUENCE_AND_HEADS = {"BSHD": (1, 2), "BHSD": (2, 1)}


def _axes(layout: str) -> tuple[int, int]:
    if layout not in _SEQUENCE_AND_HEADS:
        raise ValueError(f"purlin: layout {layout!r} is unknown; take 'BSHD' or 'BHSD'")
    return _SEQUENCE_AND_HEADS[layout]


def _require_four_axes(op: str, layout: str, arrays: Iterable[jax.Array]) -> None:
    for x in arrays:
        if x.ndim != 4:
            raise ValueError(f"purlin.{op}: {layout} has four axes, got shape {x.shape}")


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
    _require_four_axes("scatter_heads", layout, arrays)
    for x in arrays:
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
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    joint: Joint | None = None,
    head_policy: str = "error",
    backend: str | None = None,
) -> Any:
    """Attention over a sequence that is sharded over `axis_name`.

    Inside jax.shard_map the arrays are local shards; with `mesh` they are global, the call wraps
    jax.shard_map itself and may stand in plain jit.

    Args:
      q: [batch, sequence / P, heads, dim] (or BHSD) for P ranks, of any dtype that attn_fn takes.
      k, v: the same with as many heads or fewer, a divisor of q's. Where P is a multiple of their
        number, each head is replicated to P / heads ranks.
      axis_name: mesh axis over which the sequence is sharded.
      mesh: wraps jax.shard_map over this mesh.
      batch_axis: with `mesh`, the mesh axis over which the batch is sharded, if any.
      layout: "BSHD" or "BHSD", of arguments and result.
      attn_fn: attn_fn(q, k, v, **kwargs) on the whole sequence and the local heads, in `layout`;
        kwargs holds is_causal, scale and the lengths where they are given. The default is
        jax.nn.dot_product_attention.
      is_causal: mask keys after the query; `joint` tokens count where they stand.
      scale: of the logits; the default is 1 / sqrt(dim).
      query_seq_lengths, key_value_seq_lengths: [batch] integers, the same on all ranks: the true
        length of the whole sequence, padded at its end, as in jax.nn.dot_product_attention. They
        count `joint` tokens in front; tokens at the rear would follow the padding.
      joint: tokens that attend together with these.
      head_policy: where heads neither divide by P nor can be replicated, "error" raises and "pad"
        attends with more heads, of zeros, and drops them again.
      backend: as in all_to_all.

    Returns:
      The attention output, shaped and sharded like `q`; with `joint`, a pair of it and of the
      output for joint.q, shaped and placed like joint.q.

    Raises:
      NameError: the axis is not bound by a jax.shard_map around the call, and no mesh is given.
      ValueError: heads, shapes or arguments that do not fit; the message names the numbers and the
        remedies.
    """
    sequence, heads = _axes(layout)
    static: dict[str, Any] = {
        "axis_name": axis_name,
        "layout": layout,
        "attn_fn": attn_fn,
        "is_causal": is_causal,
        "scale": scale,
        "head_policy": head_policy,
        "backend": backend,
    }
    lengths = {
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
    }
    if mesh is not None:
        dims: list[Any] = [batch_axis, None, None, None]
        dims[sequence] = axis_name
        shard, batch = PartitionSpec(*dims), PartitionSpec(batch_axis)
        text_spec = batch if joint is None or joint.placement == "replicated" else shard

        def local(qkv: tuple[jax.Array, ...], joint: Joint | None, lengths: Any) -> Any:
            q, k, v = qkv
            return ulysses_attention(q, k, v, joint=joint, **lengths, **static)

        args, specs = ((q, k, v), joint, lengths), (shard, text_spec, batch)
        if AxisType.Explicit in mesh.axis_types:  # shard_map never reshards those by itself
            args = jax.reshard(args, tuple(NamedSharding(mesh, spec) for spec in specs))
        out_specs = shard if joint is None else (shard, text_spec)
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_specs)(*args)

    op = "ulysses_attention"
    names = groups_lib.canonical_axes(axis_name)
    groups_lib.require_bound(op, names)
    _require_four_axes(op, layout, (q, k, v))
    if k.shape[heads] != v.shape[heads]:
        raise ValueError(
            f"purlin.{op}: {k.shape[heads]} heads of k and {v.shape[heads]} of v; give as many"
        )
    if joint is not None:
        joint.check(op, (q, k, v), sequence)
    world = groups_lib.world_size(names, None)
    plan = plan_heads(op, q.shape[heads], k.shape[heads], world, head_policy)
    kwargs = _lengths(op, lengths, q.shape[0], joint)
    if is_causal:
        kwargs["is_causal"] = True
    if scale is not None:
        kwargs["scale"] = scale
    attend = partial(attn_fn or partial(_default_attention, layout), **kwargs)
    exchange: dict[str, Any] = {"axis_name": axis_name, "layout": layout, "backend": backend}
    with jax.named_scope(f"purlin/{op}"):
        image = _widen(plan, (q, k, v), heads)
        if joint is None:
            o = attend(*scatter_heads(*image, **exchange))
            return plan.narrow_queries(gather_heads(o, **exchange), heads)

        text = _widen(plan, (joint.q, joint.k, joint.v), heads)
        replicated = joint.placement == "replicated"
        if replicated:
            image = scatter_heads(*image, **exchange)
            text = [groups_lib.own_block(x, heads, names, None) for x in text]
        else:
            moved = scatter_heads(*image, *text, **exchange)
            image, text = moved[:3], moved[3:]
        joined = [joint.join(t, x, sequence) for t, x in zip(text, image, strict=True)]
        o_text, o = joint.part(attend(*joined), text[0].shape[sequence], sequence)
        if replicated:
            o = gather_heads(o, **exchange)
            o_text = all_heads(o_text, axis_name, heads, backend)
        else:
            o, o_text = gather_heads(o, o_text, **exchange)
        return plan.narrow_queries(o, heads), plan.narrow_queries(o_text, heads)


def _default_attention(
    layout: str, q: jax.Array, k: jax.Array, v: jax.Array, **kwargs: Any
) -> jax.Array:
    if layout == "BSHD":
        return jax.nn.dot_product_attention(q, k, v, **kwargs)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, **kwargs).swapaxes(1, 2)


def _lengths(op: str, given: dict[str, Any], batch: int, joint: Joint | None) -> dict[str, Any]:
    """The lengths that are given, as jax.nn.dot_product_attention takes them."""
    lengths = {name: jnp.asarray(x) for name, x in given.items() if x is not None}
    for name, x in lengths.items():
        if x.shape != (batch,) or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(
                f"purlin.{op}: {name} is {x.dtype}{list(x.shape)}; give one integer for each of "
                f"the {batch} sequences of a batch"
            )
        if joint is not None and joint.where == "rear":
            raise ValueError(
                f"purlin.{op}: {name} counts from the front, and joint tokens at the rear would "
                "follow the padding; put them in front (where='front') and count them in"
            )
    return {name: x.astype(jnp.int32) for name, x in lengths.items()}


def _widen(plan: HeadPlan, qkv: tuple[jax.Array, ...], heads: int) -> Any:
    q, k, v = qkv
    return plan.widen_queries(q, heads), plan.widen_keys(k, heads), plan.widen_keys(v, heads)
