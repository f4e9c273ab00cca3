"""Who runs a collective: purlin or jax.lax, and why."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.export
from absl import logging

from purlin_jax import _native

BACKENDS = ("auto", "purlin", "lax")

_context = jax.make_user_context(None)  # part of the cache key of jax.jit


class FallbackError(RuntimeError):
    """Purlin cannot run a collective, and jax.lax was not allowed to take its place."""


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Choose who runs the collectives that are traced inside the context.

    Args:
      name: "auto" takes jax.lax where purlin cannot run; "purlin" raises there; "lax" always takes
        jax.lax. The context is part of jit's cache key.
    """
    with _context(_checked(name)):
        yield


def resolve(name: str | None) -> str:
    """The back end in force: the argument, else the context, else PURLIN_BACKEND, else "auto".

    PURLIN_FALLBACK=error (strict mode) turns "auto" into "purlin".
    """
    found = name or _context.value or os.environ.get("PURLIN_BACKEND") or "auto"
    strict = os.environ.get("PURLIN_FALLBACK") == "error"
    return "purlin" if strict and found == "auto" else _checked(found)


def _checked(name: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"purlin: no backend {name!r}; take one of {BACKENDS}")
    return name


def fall_back(op: str, reason: str, chosen: str) -> None:
    """Say that jax.lax takes over; raise FallbackError where it may not."""
    if chosen == "purlin":
        raise FallbackError(
            f"purlin.{op} cannot run here: {reason}. Use backend='lax', or backend='auto' without "
            "PURLIN_FALLBACK=error, to take jax.lax instead"
        )
    logging.log_first_n(logging.INFO, "purlin.%s goes to jax.lax: %s", 10, op, reason)


def refusal(op: str, reduce: str, avals: Sequence[Any], world: int) -> str | None:
    """Why purlin cannot run this collective on any platform, or None if it can."""
    if world > _native.max_ranks:
        return f"{world} ranks are more than the {_native.max_ranks} of one domain"
    for aval in avals:
        if any(map(jax.export.is_symbolic_dim, aval.shape)):
            return f"shape {aval.shape} is symbolic, and plans are made of numbers"
        if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
            return f"dtype {aval.dtype} is not plain data"
        if re.match(r"u?int[124](_|$)|float[46]_", aval.dtype.name):
            return f"dtype {aval.dtype} has fewer than 8 bits"
        if reduce and (reduce, aval.dtype.name) not in _native.reduces:
            return f"a {reduce} of {aval.dtype} is not defined"
    return None
