"""Ulysses sequence parallelism: exchange sequence shards for head shards around attention.

Between devices each rank holds a shard of the sequence with all heads; inside attention it holds
the whole sequence with a shard of the heads (Jacobs et al., DeepSpeed-Ulysses, arXiv 2309.14509).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from purlin_jax import groups as groups_lib
from purlin_jax.head_exchange import Exchange, axes_of, require_four_axes
from purlin_jax.heads import plan_heads
from purlin_jax.joint import Joint, all_heads


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
        attends with more heads, of zeros, and drops them again. "uneven" does the same and sends
        real heads alone, by all_to_all_v.
      backend: as in all_to_all.

    Returns:
      The attention output, shaped and sharded like `q`; with `joint`, a pair of it and of the
      output for joint.q, shaped and placed like joint.q.

    Raises:
      NameError: the axis is not bound by a jax.shard_map around the call, and no mesh is given.
      ValueError: heads, shapes or arguments that do not fit; the message names the numbers and the
        remedies.
    """
    sequence, heads = axes_of(layout)
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
        _check_shards(mesh, axis_name, batch_axis, layout, {"q": q, "k": k, "v": v}, joint)
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
    require_four_axes(op, layout, (q, k, v))
    if k.shape[heads] != v.shape[heads]:
        raise ValueError(
            f"purlin.{op}: {k.shape[heads]} heads of k and {v.shape[heads]} of v; give as many"
        )
    if joint is not None:
        joint.check(op, (q, k, v), sequence)
    world = groups_lib.world_size(names, None)
    plan = plan_heads(op, q.shape[heads], k.shape[heads], world, head_policy)
    exchange = Exchange(plan, head_policy == "uneven", names, world, layout, backend)
    kwargs = _lengths(op, lengths, q.shape[0], joint)
    if is_causal:
        kwargs["is_causal"] = True
    if scale is not None:
        kwargs["scale"] = scale
    attend = partial(attn_fn or partial(_default_attention, layout), **kwargs)
    with jax.named_scope(f"purlin/{op}"):
        if joint is None:
            return exchange.gather(attend(*exchange.scatter((q, k, v))))[0]

        tokens = (joint.q, joint.k, joint.v)
        replicated = joint.placement == "replicated"
        if replicated:
            image = exchange.scatter((q, k, v))
            text = [groups_lib.own_block(x, heads, names, None) for x in exchange.widen(tokens)]
        else:
            moved = exchange.scatter((q, k, v), tokens)
            image, text = moved[:3], moved[3:]
        joined = [joint.join(t, x, sequence) for t, x in zip(text, image, strict=True)]
        o_text, o = joint.part(attend(*joined), text[0].shape[sequence], sequence)
        if replicated:
            o_text = plan.narrow_queries(all_heads(o_text, axis_name, heads, backend), heads)
            return exchange.gather(o)[0], o_text
        return tuple(exchange.gather(o, o_text))


def _check_shards(
    mesh: Mesh,
    axis_name: groups_lib.AxisName,
    batch_axis: groups_lib.AxisName | None,
    layout: str,
    arrays: dict[str, jax.Array],
    joint: Joint | None,
) -> None:
    """Raise ValueError where whole arrays do not divide over the mesh, as shard_map would."""
    op, sequence = "ulysses_attention", axes_of(layout)[0]
    require_four_axes(op, layout, arrays.values())
    if joint is not None:
        tokens = {"joint.q": joint.q, "joint.k": joint.k, "joint.v": joint.v}
        arrays |= {name: x for name, x in tokens.items() if x.ndim == 4}  # others are told later
    cut = {sequence: groups_lib.canonical_axes(axis_name)}
    if batch_axis is not None:
        cut[0] = groups_lib.canonical_axes(batch_axis)
    for axis, names in cut.items():
        if unknown := [name for name in names if name not in mesh.axis_names]:
            raise ValueError(f"purlin.{op}: the mesh has axes {mesh.axis_names}, not {unknown}")
        ranks = math.prod(mesh.shape[name] for name in names)
        for what, x in arrays.items():
            whole = joint is not None and joint.placement == "replicated" and "joint" in what
            if x.shape[axis] % ranks and not (whole and axis == sequence):
                remedy = "pad it and give its lengths" if axis == sequence else "pad it"
                raise ValueError(
                    f"purlin.{op}: axis {axis} of {what} {list(x.shape)} does not divide over the "
                    f"{ranks} ranks of {names}; {remedy}"
                )


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
