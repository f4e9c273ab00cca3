"""Joint tokens: a second sequence, such as text, that attends together with a sharded one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from purlin_jax._compat import check_vma
from purlin_jax.collectives import all_gather

_WHERE = ("front", "rear")
_PLACEMENTS = ("replicated", "sharded")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("q", "k", "v"),
    meta_fields=("where", "placement"),
)
@dataclass(frozen=True)
class Joint:
    """Tokens that attend together with those of a sharded sequence: text beside an image.

    A pytree of q, k and v; `where` and `placement` are static.

    Attributes:
      q, k, v: in the layout, dtype, batch, heads and dim of ulysses_attention's q, k and v, with a
        sequence of their own.
      where: "front" or "rear" of the other sequence, as causal masks and lengths count.
      placement: "replicated" where every rank holds all these tokens, "sharded" where each holds
        its shard of them along the sequence. Text that is short against the image goes cheaper
        replicated: only its output is exchanged.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    where: str = "front"
    placement: str = "replicated"

    def __post_init__(self) -> None:
        if self.where not in _WHERE:
            raise ValueError(f"purlin.Joint: no where={self.where!r}; take one of {_WHERE}")
        if self.placement not in _PLACEMENTS:
            raise ValueError(
                f"purlin.Joint: no placement={self.placement!r}; take one of {_PLACEMENTS}"
            )

    def check(self, op: str, image: Sequence[jax.Array], sequence: int) -> None:
        """Raise ValueError where these tokens cannot be joined to the image's q, k and v."""
        for name, x in zip("qkv", image, strict=True):
            text = getattr(self, name)
            shape = list(x.shape)
            if text.ndim == 4:
                shape[sequence] = text.shape[sequence]
            if list(text.shape) != shape or text.dtype != x.dtype:
                raise ValueError(
                    f"purlin.{op}: joint.{name} is {text.dtype}{list(text.shape)} and {name} is "
                    f"{x.dtype}{list(x.shape)}; they may differ along axis {sequence}, the "
                    "sequence, alone"
                )

    def join(self, text: jax.Array, image: jax.Array, sequence: int) -> jax.Array:
        """Both as one sequence."""
        pair = (text, image) if self.where == "front" else (image, text)
        return jnp.concatenate(pair, sequence)

    def part(self, joined: jax.Array, text: int, sequence: int) -> tuple[jax.Array, jax.Array]:
        """The inverse of join for a text of that length: text and image."""
        if self.where == "front":
            front, rear = jnp.split(joined, [text], sequence)
            return front, rear
        front, rear = jnp.split(joined, [joined.shape[sequence] - text], sequence)
        return rear, front


def all_heads(x: jax.Array, axis_name: Any, heads: int, backend: str | None) -> jax.Array:
    """The blocks of heads of all ranks, on all of them."""
    # Under check_vma the result must be typed as equal on all ranks, or out_specs could not leave
    # the axis out.
    to = "invarying" if check_vma() else "varying"
    return all_gather(x, axis_name, axis=heads, tiled=True, to=to, backend=backend)
