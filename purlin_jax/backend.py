"""Who runs a collective: purlin or jax.lax, and why."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np
from absl import logging

from purlin_jax import _native

BACKENDS = ("auto", "purlin", "lax")

_context = jax.make_user_context(None)  # part of the cache key of jax.jit
_recorder = jax.make_user_context(None)


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
    if (fallback := os.environ.get("PURLIN_FALLBACK", "")) not in ("", "error"):
        raise ValueError(
            f"purlin: PURLIN_FALLBACK={fallback}; set it to 'error' for strict mode, or unset it"
        )
    found = name or _context.value or os.environ.get("PURLIN_BACKEND") or "auto"
    return "purlin" if fallback and found == "auto" else _checked(found)


def _checked(name: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"purlin: no backend {name!r}; take one of {BACKENDS}")
    return name


class Handed(NamedTuple):
    """A collective that went to jax.lax, and why."""

    op: str
    site: str
    reason: str


class Recorder:
    """What went to jax.lax while a program was traced and lowered; for explain."""

    def __init__(self) -> None:
        self.handed: list[Handed] = []


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record what goes to jax.lax inside the context, and raise nothing for it.

    Each recorder is a cache key of its own, so what was traced before is traced again.
    """
    recorder = Recorder()
    with _recorder(recorder):
        yield recorder


def record(op: str, site: str, reason: str) -> bool:
    """Tell the recorder, and say whether there is one."""
    if _recorder.value is None:
        return False
    _recorder.value.handed.append(Handed(op, site, reason))
    return True


def scope(op: str, site: str) -> str:
    """The named scope of a collective; with its call site in a program that is only explained.

    That is how what jax.lax makes of a call is found again in the compiled program.
    """
    return f"purlin/{op}" if _recorder.value is None else f"purlin/{op}[{site}]"


def fall_back(op: str, reason: str, chosen: str, site: str = "") -> None:
    """Say that jax.lax takes over; raise FallbackError where it may not."""
    refused = chosen == "purlin"
    if record(op, site, f"{reason}; an error in strict mode, which is on" if refused else reason):
        return
    if refused:
        raise FallbackError(
            f"purlin.{op} cannot run here: {reason}. Use backend='lax', or backend='auto' without "
            "PURLIN_FALLBACK=error, to take jax.lax instead"
        )
    logging.log_first_n(logging.INFO, "purlin.%s goes to jax.lax: %s", 10, op, reason)


def reduction(op: str, dtype: Any) -> str:
    """What a reduction of this dtype is called in the tables: a max of booleans is an or."""
    return {"max": "or", "min": "and"}.get(op, op) if dtype == np.bool_ else op


def refusal(reduce: str, avals: Sequence[Any], world: int) -> str | None:
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
        known = reduction(reduce, aval.dtype), aval.dtype.name
        if reduce and known not in _native.reduces:
            return f"purlin has no {reduce} of {aval.dtype}"
    return None
