"""How heads of queries, keys and values are made to divide over ranks: replicated or padded."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

POLICIES = ("error", "pad", "uneven")


@dataclass(frozen=True)
class HeadPlan:
    """What is done to heads before they are exchanged; nothing where they divide.

    Query heads are seen as [kv_heads, group]: the `group` heads that follow each other share one
    key/value head. Both sizes are padded at their ends, so that every real query keeps its key, and
    each key/value head is repeated for the ranks among which its group is split.

    Attributes:
      kv_heads, group: sizes as given.
      kv_padded, group_padded: sizes with zero heads.
      kv_repeat: adjacent copies of each key/value head.
    """

    kv_heads: int
    group: int
    kv_padded: int
    group_padded: int
    kv_repeat: int

    @property
    def q_exchanged(self) -> int:
        """Query heads that are exchanged, over all ranks."""
        return self.kv_padded * self.group_padded

    @property
    def kv_exchanged(self) -> int:
        """Key/value heads that are exchanged, over all ranks."""
        return self.kv_padded * self.kv_repeat

    def real(self, world: int) -> tuple[list[int], list[int]]:
        """Heads of queries and of keys that are no padding, for each rank.

        They follow each other in the order of ranks, and on a rank padding comes last.
        """
        share = self.q_exchanged // world
        queries = [
            sum(
                h % self.group_padded < self.group and h // self.group_padded < self.kv_heads
                for h in range(p * share, (p + 1) * share)
            )
            for p in range(world)
        ]
        share = self.kv_exchanged // world
        left = self.kv_heads * self.kv_repeat
        keys = [min(share, max(0, left - p * share)) for p in range(world)]
        return queries, keys

    def widen_queries(self, x: jax.Array, axis: int) -> jax.Array:
        """The given query heads along `axis` to those that are exchanged."""
        if self.q_exchanged == self.kv_heads * self.group:
            return x
        x = _resize(x, axis, (self.kv_heads, self.group))
        for at, zeros in (
            (axis, self.kv_padded - self.kv_heads),
            (axis + 1, self.group_padded - self.group),
        ):
            x = _pad(x, at, zeros)
        return _resize(x, axis, (self.q_exchanged,), 2)

    def widen_keys(self, x: jax.Array, axis: int) -> jax.Array:
        """The given key or value heads along `axis` to those that are exchanged."""
        return self.repeat_keys(_pad(x, axis, self.kv_padded - self.kv_heads), axis)

    def repeat_keys(self, x: jax.Array, axis: int) -> jax.Array:
        """Key or value heads along `axis`, each as often as ranks need it."""
        return x if self.kv_repeat == 1 else jnp.repeat(x, self.kv_repeat, axis)

    def narrow_queries(self, x: jax.Array, axis: int) -> jax.Array:
        """The inverse of widen_queries, for the output of attention."""
        if self.q_exchanged == self.kv_heads * self.group:
            return x
        x = _resize(x, axis, (self.kv_padded, self.group_padded))
        x = jax.lax.slice_in_dim(x, 0, self.kv_heads, axis=axis)
        x = jax.lax.slice_in_dim(x, 0, self.group, axis=axis + 1)
        return _resize(x, axis, (self.kv_heads * self.group,), 2)


def _resize(x: jax.Array, axis: int, sizes: tuple[int, ...], replaced: int = 1) -> jax.Array:
    """Reshape `replaced` axes from `axis` on into `sizes`."""
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + replaced :])


def _pad(x: jax.Array, axis: int, zeros: int) -> jax.Array:
    return jnp.pad(x, [(0, zeros if a == axis else 0) for a in range(x.ndim)]) if zeros else x


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


def plan_heads(op: str, q_heads: int, kv_heads: int, world: int, policy: str) -> HeadPlan:
    """The cheapest way to give each of `world` ranks as many heads, in groups that stay whole.

    Key/value heads go as they are, padded to a multiple of the ranks; or where they divide the
    ranks, each goes to world / kv_heads of them, among which its (padded) group of queries is
    split. Of the two, the one with fewer query heads is taken, since attention costs as many.

    Args:
      op: name of the caller, for errors.
      q_heads, kv_heads: as given; the former is a multiple of the latter.
      world: ranks over which heads are scattered.
      policy: "error" raises where heads would have to be padded; "pad" pads them with zeros, as
        does "uneven" where they are attended with, but not where they are exchanged.

    Raises:
      ValueError: heads that do not fit each other or, with "error", the ranks; or no such policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"purlin.{op}: no head_policy {policy!r}; take one of {POLICIES}")
    if not kv_heads or q_heads % kv_heads:
        raise ValueError(
            f"purlin.{op}: {q_heads} query heads are no multiple of {kv_heads} key/value heads; "
            "give each key/value head as many queries"
        )
    group = q_heads // kv_heads
    plans = [HeadPlan(kv_heads, group, _up(kv_heads, world), group, 1)]
    if world % kv_heads == 0:
        ranks = world // kv_heads
        plans.append(HeadPlan(kv_heads, group, kv_heads, _up(group, ranks), ranks))
    plan = min(plans, key=lambda p: (p.q_exchanged, p.kv_exchanged))
    if policy == "error" and plan.q_exchanged != q_heads:
        raise ValueError(
            f"purlin.{op}: {q_heads} query and {kv_heads} key/value heads do not divide over "
            f"{world} ranks; shard the sequence over a divisor of {kv_heads}, or pass "
            f"head_policy='pad' to attend with {plan.q_exchanged} and {plan.kv_exchanged} heads "
            f"(+{plan.q_exchanged / q_heads - 1:.0%}), or 'uneven' to send none of the padding"
        )
    return plan
