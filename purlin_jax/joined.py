"""What every public collective does before its own: checks its axes, and decides who runs it."""

from __future__ import annotations

import re
import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from purlin_jax import _native, lowering, primitive
from purlin_jax import groups as groups_lib
from purlin_jax._compat import make_varying
from purlin_jax.backend import fall_back, record, reduction, refusal, resolve, scope
from purlin_jax.lax_forms import lax_equivalent
from purlin_jax.policy import Policy
from purlin_jax.policy import resolve as resolve_policy

_PACKAGE, _JAX = Path(__file__).parent, Path(jax.__file__).parent
lowering.register()
REDUCTIONS = tuple(dict.fromkeys(op for op, _ in _native.reduces))
_called: ContextVar[str] = ContextVar("purlin_called", default="")


@contextmanager
def calling(name: str) -> Iterator[None]:
    """What errors and reports call the collectives inside: the function that the user has called.

    The outermost counts.
    """
    token = _called.set(_called.get() or name)
    try:
        yield
    finally:
        _called.reset(token)


@dataclass(frozen=True)
class Joined:
    """One collective over checked mesh axes: what all its operands share."""

    op: str
    names: tuple[Hashable, ...]
    groups: groups_lib.Groups | None
    world: int
    backend: str
    policy: Policy
    site: str
    reduce: str = ""
    name: str = ""  # what the user wrote, for errors and reports

    def require_dtype(self, dtype: Any) -> None:
        """Raise TypeError for what neither purlin nor jax.lax can do."""
        if self.reduce in ("sum", "prod") and dtype == np.bool_:
            raise TypeError(
                f"purlin.{self.name}: a {self.reduce} of booleans is no boolean; count them with "
                "purlin.psum, or reduce with 'or', 'and' or 'xor'"
            )
        integral = jnp.issubdtype(dtype, np.integer) or dtype == np.bool_
        if self.reduce in ("and", "or", "xor") and not integral:
            raise TypeError(
                f"purlin.{self.name}: no {self.reduce!r} of {dtype.name}; it is for integers and "
                "booleans"
            )
        if self.reduce in ("max", "min") and jnp.issubdtype(dtype, np.complexfloating):
            raise TypeError(
                f"purlin.{self.name}: no {self.reduce!r} of {dtype.name}, which has no order; "
                "reduce a real number, its absolute value for example"
            )
        if re.match(r"u?int[12]$", dtype.name):  # XLA may end the process
            raise TypeError(
                f"purlin.{self.name}: no collective carries {dtype.name}; widen it to int8 or int4"
            )

    def goes_to_lax(self, operands: Sequence[jax.Array]) -> bool:
        """Whether jax.lax takes these operands; FallbackError where it may not."""
        if self.backend == "lax":
            return True
        reason = refusal(self.reduce, [jax.typeof(x) for x in operands], self.world)
        if reason is not None:
            fall_back(self.op, reason, self.backend, self.site)
        return reason is not None

    def run(
        self,
        leaves: Sequence[jax.Array],
        axes: Sequence[tuple[int, int]],
        *,
        invariant: bool = False,
    ) -> list[jax.Array]:
        """Send canonical operands through the primitive, several in one call where types allow.

        `invariant`: the result is typed as equal on all devices, and so is its cotangent.
        """
        for x in leaves:
            self.require_dtype(x.dtype)
        params = primitive.Params(
            op=self.op,
            reduce=self.reduce,
            axes=self.names,
            groups=self.groups,
            world=self.world,
            split=tuple(split for split, _ in axes),
            concat=tuple(concat for _, concat in axes),
            invariant=invariant,
            policy=self.policy,
            backend=self.backend,
            site=self.site,
            name=self.name,
        )
        with jax.named_scope(scope(self.op, self.site)):
            if self.goes_to_lax(leaves):
                return lax_equivalent(params, leaves)
            leaves = [make_varying(x, self.names) for x in leaves]
            results: dict[int, jax.Array] = {}
            for batch in batches(leaves, same_dtype=bool(self.reduce)):
                reduce = reduction(self.reduce, leaves[batch[0]].dtype)
                call = params.select(batch)._replace(reduce=reduce)
                out = primitive.bind(call, [leaves[i] for i in batch])
                results.update(zip(batch, out, strict=True))
        return [results[i] for i in range(len(leaves))]


def join(
    op: str,
    axis_name: groups_lib.AxisName,
    axis_index_groups: Any,
    backend: str | None,
    policy: Policy | str | None,
    reduce: str = "",
) -> Joined:
    called = _called.get() or op
    names = groups_lib.canonical_axes(axis_name)
    groups_lib.require_bound(called, names)
    if _native.collectives[op]["consume"] == "reduce" and reduce not in REDUCTIONS:
        raise ValueError(f"purlin.{called}: no reduction {reduce!r}; take one of {REDUCTIONS}")
    size = groups_lib.world_size(names, None)
    groups = groups_lib.canonical_groups(called, axis_index_groups, size)
    world = groups_lib.world_size(names, groups)
    chosen, site = resolve(backend), _call_site()
    if chosen == "lax":
        record(op, site, "asked for: backend='lax'")
    local = groups_lib.vmapped(names)
    if local and len(local) < len(names):
        reason = f"axes {local} belong to a vmap and the others to the mesh"
        fall_back(op, reason, chosen, site)
    # Along the axis of a vmap there is nothing to send, so jax.lax is no fall.
    chosen = "lax" if local else chosen
    policy = resolve_policy(policy)
    return Joined(op, names, groups, world, chosen, policy, site, reduce, called)


def _call_site() -> str:
    """file.py:line of the first caller outside this package and JAX."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@cache
def is_users(file: str) -> bool:
    """Whether a file is neither of this package nor of JAX."""
    path = Path(file)
    return path.parent != _PACKAGE and _JAX not in path.parents


def batches(leaves: Sequence[jax.Array], *, same_dtype: bool) -> list[list[int]]:
    """Operands that may travel in one call: at most _native.max_operands, one dtype to reduce."""
    by_key: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        by_key.setdefault(x.dtype if same_dtype else None, []).append(i)
    step = _native.max_operands
    return [
        members[at : at + step]
        for members in by_key.values()
        for at in range(0, len(members), step)
    ]
