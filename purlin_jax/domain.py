"""Start of the native part: checks that it fits this jaxlib, and registers it on first use."""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from typing import Any

import jax

from purlin_jax import _compat, _native

cuda: Any = None  # stays None where no CUDA compiler was found at the build
if importlib.util.find_spec("purlin_jax._cuda") is not None:
    cuda = importlib.import_module("purlin_jax._cuda")

TARGET = "purlin_collective_v1"  # grows with every change of operands or attributes
_STATE = "purlin_call_site_v1"

_lock = threading.Lock()
_registered: set[str] = set()
_limits: tuple[float, float] | None = None


def check_ffi_api() -> None:
    """Raise ImportError if the installed jaxlib is older than the headers purlin was built with."""
    built, runtime = _native.ffi_api, _compat.runtime_ffi_api()
    if runtime is not None and (runtime[0] != built[0] or runtime[1] < built[1]):
        raise ImportError(
            f"purlin_jax was built for XLA FFI {built[0]}.{built[1]} and the installed jaxlib "
            f"speaks {runtime[0]}.{runtime[1]}; install a newer jaxlib, or build purlin_jax again "
            "beside this one"
        )


def ensure_started(platform: str) -> None:
    """Register the custom-call target of "cpu" or "cuda", and start the domain of the GPUs.

    Not at import: a registration before the backend exists is flushed in the wrong order, and
    starting the backend early would break jax.distributed.
    """
    with _lock:
        if platform in _registered:
            return
        jax.devices(platform)
        native = _module(platform)
        if platform == "cuda":
            native.start()
        native.set_limits(*budget())
        target = native.targets()
        name = "CUDA" if platform == "cuda" else platform
        jax.ffi.register_ffi_type(_STATE, target["type"], platform=name)
        jax.ffi.register_ffi_target(TARGET, target["stages"], platform=name)
        _registered.add(platform)


def budget() -> tuple[float, float]:
    """Seconds after which a wait is reported, and after which it ends in an error.

    What set_timeout was told, else PURLIN_SLOW_S (60) and PURLIN_TIMEOUT_S (1800; 0 never ends it).
    """
    return _limits or (
        float(os.environ.get("PURLIN_SLOW_S", "60")),
        float(os.environ.get("PURLIN_TIMEOUT_S", "1800")),
    )


def set_timeout(seconds: float, *, slow: float = 60.0) -> None:
    """Change how long a rank waits for another, also in programs that are compiled already.

    Args:
      seconds: a wait that lasts longer ends in an error; 0 waits for ever.
      slow: a wait that lasts longer is reported on stderr, once.
    """
    global _limits
    with _lock:
        _limits = (slow, seconds)
        for platform in _registered:
            _module(platform).set_limits(slow, seconds)


def last_report() -> str:
    """The last report of a wait that did not end, as printed on stderr; empty if there was none."""
    reports = [_module(platform).last_report() for platform in sorted(_registered)]
    return "\n".join(text for text in reports if text)


def _module(platform: str) -> Any:
    return cuda if platform == "cuda" else _native


def refusal(platform: str, mesh: Any, reduce: str, dtype: str) -> str | None:
    """Why the devices of `mesh` are not one domain that can do this, or None if they are."""
    if platform == "cpu":
        return "the CPU devices belong to several processes" if jax.process_count() > 1 else None
    if cuda is None:
        return "purlin_jax was built without CUDA"
    if not isinstance(mesh, jax.sharding.Mesh):
        return "the mesh is abstract, so the GPUs of its ranks are not known"
    if any(d.process_index != jax.process_index() for d in mesh.devices.flat):
        return "the GPUs belong to several processes"
    if reduce and (reduce, dtype) not in cuda.reduces:
        return f"GPUs know no {reduce} of {dtype} yet"
    ensure_started("cuda")
    if not cuda.can_peer(ordinals(mesh)):
        return "some of the GPUs cannot read each other's memory"
    return None


def ordinals(mesh: Any) -> list[int]:
    """The local hardware number of each logical device of a concrete mesh."""
    return [d.local_hardware_id for d in mesh.devices.flat]


def arch(platform: str, mesh: Any) -> str:
    """Name of the policy table for the devices: "cpu", or "sm_90" for compute capability 9.0."""
    if platform == "cpu":
        return "cpu"
    return "sm_" + mesh.devices.flat[0].compute_capability.replace(".", "")


def native_regimes() -> dict[tuple[str, str], int]:
    """How often native code ran each (collective, regime) in this process.

    One call is one rank that ran one collective: a collective over 8 devices counts 8. On GPUs the
    kernels count, so calls that XLA replays without the host are counted too.
    """
    counts: dict[tuple[str, str], int] = dict(_native.calls())
    for key, n in (cuda.calls() if cuda is not None else {}).items():
        counts[key] = counts.get(key, 0) + n
    return counts


def native_calls() -> dict[str, int]:
    """The same count for each collective."""
    counts: dict[str, int] = {}
    for (op, _), n in native_regimes().items():
        counts[op] = counts.get(op, 0) + n
    return counts
