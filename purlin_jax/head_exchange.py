"""The exchanges of Ulysses: shards of a sequence for shards of heads, and back."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from purlin_jax import groups as groups_lib
from purlin_jax.collectives import all_to_all
from purlin_jax.heads import HeadPlan
from purlin_jax.joined import calling
from purlin_jax.varlen import send_rows

_SEQUENCE_AND_HEADS = {"BSHD": (1, 2), "BHSD": (2, 1)}


def axes_of(layout: str) -> tuple[int, int]:
    if layout not in _SEQUENCE_AND_HEADS:
        raise ValueError(f"purlin: layout {layout!r} is unknown; take 'BSHD' or 'BHSD'")
    return _SEQUENCE_AND_HEADS[layout]


def require_four_axes(op: str, layout: str, arrays: Iterable[jax.Array]) -> None:
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
    sequence, heads = axes_of(layout)
    names = groups_lib.canonical_axes(axis_name)
    groups_lib.require_bound("scatter_heads", names)
    world = groups_lib.world_size(names, None)
    require_four_axes("scatter_heads", layout, arrays)
    for x in arrays:
        if x.shape[heads] % world:
            raise ValueError(
                f"purlin.scatter_heads: {x.shape[heads]} heads do not divide over {world} ranks; "
                f"shard the sequence over a divisor of {x.shape[heads]}, or pad the heads to "
                f"{-(-x.shape[heads] // world) * world}"
            )
    with calling("scatter_heads"):
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
    sequence, heads = axes_of(layout)
    groups_lib.require_bound("gather_heads", groups_lib.canonical_axes(axis_name))
    with calling("gather_heads"):
        moved = all_to_all(arrays, axis_name, sequence, heads, tiled=True, backend=backend)
    return moved[0] if len(arrays) == 1 else moved


@dataclass(frozen=True)
class Exchange:
    """The exchange of one attention, in which heads may not divide over the ranks.

    Attributes:
      plan: how they are made to.
      uneven: whether real heads travel alone, as rows that are counted; otherwise also padding.
      names, world, layout, backend: as in scatter_heads.
    """

    plan: HeadPlan
    uneven: bool
    names: tuple[Hashable, ...]
    world: int
    layout: str
    backend: str | None

    def widen(self, qkv: Sequence[jax.Array]) -> list[jax.Array]:
        """q, k and v with heads that divide."""
        _, heads = axes_of(self.layout)
        q, k, v = qkv
        keys = [self.plan.widen_keys(x, heads) for x in (k, v)]
        return [self.plan.widen_queries(q, heads), *keys]

    def scatter(self, *triples: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays of all triples q, k, v, for all of the sequence and the own heads."""
        with calling("ulysses_attention"):
            return self._scatter(triples)

    def gather(self, *arrays: jax.Array) -> list[jax.Array]:
        """The inverse for outputs of attention: the own shard of the sequence, all real heads."""
        with calling("ulysses_attention"):
            return self._gather(arrays)

    def _scatter(self, triples: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        if not self.uneven:
            arrays = [x for qkv in triples for x in self.widen(qkv)]
            return list(
                scatter_heads(
                    *arrays, axis_name=self.names, layout=self.layout, backend=self.backend
                )
            )
        _, heads = axes_of(self.layout)
        queries, keys = self.plan.real(self.world)
        q = [x for x, _, _ in triples]
        kv = [self.plan.repeat_keys(x, heads) for _, *both in triples for x in both]
        if queries == keys:
            moved = self._to_heads(q + kv, queries, self.plan.q_exchanged)
        else:
            moved = self._to_heads(q, queries, self.plan.q_exchanged)
            moved += self._to_heads(kv, keys, self.plan.kv_exchanged)
        q, kv = moved[: len(q)], moved[len(q) :]
        return [x for i, own in enumerate(q) for x in (own, *kv[2 * i : 2 * i + 2])]

    def _gather(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        if self.uneven:
            return self._from_heads(arrays)
        moved = gather_heads(
            *arrays, axis_name=self.names, layout=self.layout, backend=self.backend
        )
        _, heads = axes_of(self.layout)
        many = moved if len(arrays) > 1 else [moved]
        return [self.plan.narrow_queries(x, heads) for x in many]

    # Rows are heads: [heads, batch, sequence / P, dim]. A rank has places for as many of each shard
    # of the sequence, whether real or not.

    def _to_heads(self, xs: Sequence[jax.Array], real: list[int], heads: int) -> list[jax.Array]:
        axis, share = axes_of(self.layout)[1], heads // self.world
        sizes = np.broadcast_to(real, (self.world, self.world))
        moved = self._send_rows(
            [jnp.moveaxis(x, axis, 0) for x in xs],
            self.world * share,
            starts=np.cumsum(sizes, 1) - sizes,
            sizes=sizes,
            places=np.broadcast_to(share * np.arange(self.world)[:, None], sizes.shape),
        )
        return [self._join(y.reshape(self.world, share, *y.shape[1:])) for y in moved]

    def _from_heads(self, xs: Sequence[jax.Array]) -> list[jax.Array]:
        real, _ = self.plan.real(self.world)
        share = self.plan.q_exchanged // self.world
        sizes = np.repeat(np.asarray(real)[:, None], self.world, 1)
        moved = self._send_rows(
            [y.reshape(-1, *y.shape[2:]) for y in map(self._part, xs)],
            sum(real),
            starts=np.broadcast_to(share * np.arange(self.world), sizes.shape),
            sizes=sizes,
            places=np.cumsum(sizes, 0) - sizes,
        )
        return [jnp.moveaxis(y, 0, axes_of(self.layout)[1]) for y in moved]

    def _send_rows(self, xs: Sequence[jax.Array], capacity: int, **rows: Any) -> list[jax.Array]:
        return send_rows(xs, capacity, axis_name=self.names, backend=self.backend, **rows)

    def _join(self, blocks: jax.Array) -> jax.Array:
        """[P, heads, batch, sequence / P, dim] as all of the sequence, in the layout."""
        sequence, heads = axes_of(self.layout)
        x = jnp.moveaxis(jnp.moveaxis(blocks, 1, heads + 1), 0, sequence)
        return x.reshape(*x.shape[:sequence], -1, *x.shape[sequence + 2 :])

    def _part(self, x: jax.Array) -> jax.Array:
        """The inverse of _join."""
        sequence, heads = axes_of(self.layout)
        x = x.reshape(*x.shape[:sequence], self.world, -1, *x.shape[sequence + 1 :])
        return jnp.moveaxis(jnp.moveaxis(x, sequence, 0), heads + 1, 1)
