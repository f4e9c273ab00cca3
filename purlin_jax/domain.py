"""Start of the native part: checks that it fits this jaxlib, and registers it on first use."""

from __future__ import annotations

import threading

import jax

from purlin_jax import _compat, _native

TARGET = "purlin_collective_v1"  # grows with every change of operands or attributes
_STATE = "purlin_call_site_v1"

_lock = threading.Lock()
_registered: set[str] = set()


def check_ffi_api() -> None:
    """Raise ImportError if the installed jaxlib is older than the headers purlin was built with."""
    built, runtime = _native.ffi_api, _compat.runtime_ffi_api()
    if runtime is not None and (runtime[0] != built[0] or runtime[1] < built[1]):
        raise ImportError(
            f"purlin_jax was built for XLA FFI {built[0]}.{built[1]} and the installed jaxlib "
            f"speaks {runtime[0]}.{runtime[1]}; install a newer jaxlib, or build purlin_jax again "
            "beside this one"
        )


def ensure_registered(platform: str) -> None:
    """Register the custom-call targets of `platform` ("cpu"), once.

    Not at import: a registration before the backend exists is flushed in the wrong order, and
    starting the backend early would break jax.distributed.
    """
    with _lock:
        if platform in _registered:
            return
        jax.devices(platform)
        target = _native.targets()
        jax.ffi.register_ffi_type(_STATE, target["type"], platform=platform)
        jax.ffi.register_ffi_target(TARGET, target["stages"], platform=platform)
        _registered.add(platform)


def native_calls() -> dict[str, int]:
    """How often native purlin code ran each collective in this process.

    One call is one rank that ran one collective: a collective over 8 devices counts 8.
    """
    counts: dict[str, int] = {}
    for (op, _), n in _native.calls().items():
        counts[op] = counts.get(op, 0) + n
    return counts


def native_regimes() -> dict[tuple[str, str], int]:
    """The same count for each (collective, regime), as reported by the native code."""
    return dict(_native.calls())
