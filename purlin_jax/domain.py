"""Start of the native part: checks that it fits this jaxlib, and registers it with XLA."""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from functools import cache
from typing import Any

import jax
import jax.export
import numpy as np

from purlin_jax import _compat, _native, processes
from purlin_jax.environment import number

cuda: Any = None  # stays None where no CUDA compiler was found at the build
if importlib.util.find_spec("purlin_jax._cuda") is not None:
    cuda = importlib.import_module("purlin_jax._cuda")

TARGET = "purlin_collective_v2"  # grows with every change of operands or attributes
_STATE = "purlin_call_site_v2"

_lock = threading.Lock()
_started: set[tuple[str, bool]] = set()  # platform, joined
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


@cache
def register_cpu() -> None:
    """Tell XLA of the CPU's handler, without touching a device.

    At import, since programs that were exported or compiled elsewhere run without being lowered
    here. The handlers of GPUs know their devices, so no such program holds them.
    """
    _compat.accept_cpu_types()
    _register("cpu", _native.targets())
    if {"PURLIN_SLOW_S", "PURLIN_TIMEOUT_S"} & set(os.environ):
        _native.set_limits(*budget())


def _register(platform: str, target: dict[str, Any]) -> None:
    jax.ffi.register_ffi_type(_STATE, target["type"], platform=platform)
    jax.ffi.register_ffi_target(TARGET, target["stages"], platform=platform)


def ensure_started(platform: str, *, joined: bool = False) -> None:
    """Start what "cpu" or "cuda" needs before its first call is compiled.

    The domain of the GPUs not at import: starting their backend early would break jax.distributed.

    Args:
      joined: for devices of several processes.
    """
    with _lock:
        if (platform, joined) in _started:
            return
        native = _module(platform)
        if platform == "cuda":
            devices = jax.local_devices(backend=platform)
            # A registration before that would be flushed in the wrong order.
            if platform not in _platforms():
                _register("CUDA", native.targets())
            if joined:
                processes.join_gpus(native)
            else:
                native.start([d.local_hardware_id for d in devices])
        elif joined:
            processes.join_cpus()
        native.set_limits(*budget())
        _started.add((platform, joined))


def _platforms() -> set[str]:
    return {platform for platform, _ in _started}


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What jax.export must be told to export a program that calls purlin, as `disabled_checks`.

    JAX exports only custom calls that somebody vouches for: the target's name carries a version,
    so a purlin_jax that cannot run the program refuses it by name. The program runs where
    purlin_jax has been imported, on any CPU devices; one for GPUs holds jax.lax's collectives.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(TARGET)]


def budget() -> tuple[float, float]:
    """Seconds after which a wait is reported, and after which it ends in an error.

    What set_timeout was told, else PURLIN_SLOW_S (60) and PURLIN_TIMEOUT_S (1800; 0 never ends it).
    """
    return _limits or (
        number("PURLIN_SLOW_S", 60),
        number("PURLIN_TIMEOUT_S", 1800),
    )


def set_timeout(seconds: float, *, slow: float | None = None) -> None:
    """Change how long a rank waits for another, also in programs that are compiled already.

    Args:
      seconds: a wait that lasts longer ends in an error; 0 waits for ever.
      slow: a wait that lasts longer is reported on stderr, once; None leaves that as it is.

    Raises:
      ValueError: a number of seconds that is negative or no number.
    """
    slow = budget()[0] if slow is None else slow
    if not (seconds >= 0 and slow >= 0):
        raise ValueError(f"purlin: set_timeout({seconds}, slow={slow}); take seconds of 0 or more")
    global _limits
    with _lock:
        _limits = (slow, seconds)
        for platform in _platforms() | {"cpu"}:
            _module(platform).set_limits(slow, seconds)


def last_report() -> str:
    """The last report of a wait that did not end, as printed on stderr; empty if there was none."""
    reports = [_module(platform).last_report() for platform in sorted(_platforms() | {"cpu"})]
    return "\n".join(text for text in reports if text)


def _module(platform: str) -> Any:
    return cuda if platform == "cuda" else _native


def refusal(platform: str, mesh: Any, reduce: str, dtype: str, exported: bool) -> str | None:
    """Why the devices of `mesh` are not one domain that can do this, or None if they are."""
    if platform == "cpu":
        return _no_processes(mesh, exported)
    if exported:
        return "an exported program may run on other GPUs than those its calls would name"
    if cuda is None:
        return "purlin_jax was built without CUDA"
    if not isinstance(mesh, jax.sharding.Mesh):
        return "the mesh is abstract, so the GPUs of its ranks are not known"
    if reduce and (reduce, dtype) not in cuda.reduces:
        return f"GPUs know no {reduce} of {dtype} yet"
    joined = spans_processes(mesh)
    if joined and (reason := _no_processes(mesh, exported)):
        return reason
    ensure_started("cuda", joined=joined)
    if not cuda.can_peer(device_ids(mesh), joined):
        return "some of the GPUs cannot read each other's memory"
    return None


def _no_processes(mesh: Any, exported: bool) -> str | None:
    """Why the CPU devices of `mesh` cannot work together, or None."""
    if jax.process_count() == 1:
        return None
    if exported or not isinstance(mesh, jax.sharding.Mesh):
        return "the mesh is abstract, so the processes of its devices are not known"
    if _compat.key_value_store() is None:
        return "jax.distributed has not been initialised"
    return None


def processes_of(mesh: Any) -> list[int]:
    """The process of each logical device; empty if all are of this one.

    Processes are counted on each host.
    """
    if not spans_processes(mesh):
        return []
    numbers = processes.on_their_hosts()
    return [numbers[d.process_index] for d in mesh.devices.flat]


def hosts_of(mesh: Any) -> np.ndarray | None:
    """The host of each device, shaped like the mesh; None if they are all on one."""
    if not spans_processes(mesh):
        return None
    found = processes.hosts()
    numbers = np.array([found[d.process_index] for d in mesh.devices.flat])
    return None if len(set(numbers)) == 1 else numbers.reshape(mesh.devices.shape)


def spans_processes(mesh: Any) -> bool:
    """Whether some of the devices belong to other processes."""
    return jax.process_count() > 1 and {d.process_index for d in mesh.devices.flat} != {
        jax.process_index()
    }


def no_window(platform: str, mesh: Any, partition: np.ndarray) -> str | None:
    """Why there are no windows for groups of logical devices, or None if there are."""
    if platform == "cpu":
        return None
    ids = np.asarray(device_ids(mesh))
    devices, world = ids[partition].ravel().tolist(), partition.shape[1]
    return cuda.reserve(devices, world, spans_processes(mesh)) or None


def device_ids(mesh: Any) -> list[int]:
    """What the domain of the GPUs of a concrete mesh calls each logical device.

    The local hardware numbers, or JAX's numbers where the mesh leaves this process.
    """
    if spans_processes(mesh):
        return [d.id for d in mesh.devices.flat]
    return [d.local_hardware_id for d in mesh.devices.flat]


def lends(platform: str, mesh: Any) -> bool:
    """Whether ranks may read each other's arrays where they lie."""
    return platform == "cpu" or not spans_processes(mesh) or bool(cuda.lends())


def arch(platform: str, mesh: Any) -> str:
    """Name of the policy table for the devices: "cpu", "cpu_shm", or "sm_90" for capability 9.0."""
    if platform == "cpu":
        return "cpu_shm" if processes_of(mesh) else "cpu"
    return "sm_" + mesh.devices.flat[0].compute_capability.replace(".", "")


def atom(platform: str, wanted: str, forced: bool) -> str:
    """`wanted` where the binary has it, else the newest in it; a forced one must be there."""
    if platform == "cpu" or wanted in cuda.atoms:
        return wanted
    if forced:
        raise ValueError(
            f"purlin.policy: the binary has no Atom {wanted!r}; take one of {sorted(cuda.atoms)}, "
            "or build for a newer architecture (CMAKE_CUDA_ARCHITECTURES)"
        )
    return max(cuda.atoms, key=cuda.atoms.get)


def capacity(platform: str, world: int) -> dict[str, int]:
    """Bytes from one rank to another that the windows hold, in regimes that have such a limit."""
    return cuda.capacity(world) if platform == "cuda" and cuda is not None else {}


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
    """How often native code ran each collective in this process: {"all_reduce": 8}, for example.

    Counts as native_regimes does: a call of 8 devices counts 8; what went to jax.lax does not.
    """
    counts: dict[str, int] = {}
    for (op, _), n in native_regimes().items():
        counts[op] = counts.get(op, 0) + n
    return counts
