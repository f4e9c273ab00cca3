"""Joins the processes of each host, whose devices share a mesh, over jax.distributed."""

from __future__ import annotations

import json
import os
import secrets
import threading
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from purlin_jax import _compat, _native
from purlin_jax.environment import number

_PREFIX = "purlin/processes"
_lock = threading.Lock()  # programs may be lowered by several threads


def hosts() -> list[int]:
    """The host of each process of the job, by its first process.

    Waits for each process of the job for PURLIN_JOIN_S (300) seconds.

    Raises:
      RuntimeError: a process does not come; the message names it.
    """
    with _lock:
        return _hosts()


def on_their_hosts() -> list[int]:
    """Each process's number among those of its host."""
    found = hosts()
    return [found[:process].count(host) for process, host in enumerate(found)]


def join_cpus() -> None:
    """Share memory with the processes of the own host, once. Waits like hosts()."""
    with _lock:
        _join_cpus()


def join_gpus(cuda: Any) -> None:
    """The same for the memory of GPUs, by the native module `cuda`."""
    with _lock:
        _join_gpus(cuda)


@cache
def _everybody() -> list[dict[str, str]]:
    store = _compat.key_value_store()
    if store is None:
        raise RuntimeError("purlin: several processes need jax.distributed.initialize")
    _announce(store, jax.process_index())
    return [_read(store, process) for process in range(jax.process_count())]


@cache
def _hosts() -> list[int]:
    names = [other["host"] for other in _everybody()]
    return [names.index(name) for name in names]


def _seat(platform: str) -> tuple[int, int, str, str]:
    """Own number and count on this host, name of the socket and token."""
    found, own = _hosts(), jax.process_index()
    here = [p for p in range(len(found)) if found[p] == found[own]]
    leader = _everybody()[here[0]]
    return here.index(own), len(here), f"{leader['name']}-{platform}", leader["token"]


@cache
def _join_cpus() -> None:
    megabytes = int(number("PURLIN_SHM_MIB", 65536))  # of addresses; used as touched
    own, count, name, token = _seat("cpu")
    if count > 1:
        _native.join(own, count, name, token, megabytes << 20, _seconds())


@cache
def _join_gpus(cuda: Any) -> None:
    devices = jax.local_devices(backend="cuda")
    ordinals = [(d.id, d.local_hardware_id) for d in devices]
    lends = all(_can_share(cuda, d) for d in devices)
    cuda.join(*_seat("gpu"), ordinals, lends, _seconds())


def _can_share(cuda: Any, device: jax.Device) -> bool:
    """Whether arrays of a device lie in memory that other processes can map.

    With the allocator "platform" every array has an allocation of its own, so each would have to be
    mapped, and stay so.
    """
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default") not in ("default", "bfc"):
        return False
    probe = jax.device_put(np.zeros(1, np.float32), device)
    return bool(cuda.can_share(probe.unsafe_buffer_pointer()))


def _seconds() -> float:
    return number("PURLIN_JOIN_S", 300)


@cache
def _announce(store: Any, own: int) -> None:
    """Tell the others that this process is here; once, also where one tries again."""
    me = {
        "host": _host(),
        "name": f"purlin-{os.getpid()}-{secrets.token_hex(8)}",
        "token": secrets.token_hex(16),
    }
    store.key_value_set(f"{_PREFIX}/{own}", json.dumps(me))


def _read(store: Any, process: int) -> dict[str, str]:
    seconds = _seconds()
    try:
        found = store.blocking_key_value_get(f"{_PREFIX}/{process}", int(seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"purlin: process {process} did not come within {seconds:g} s; all processes must run "
            "the same program (PURLIN_JOIN_S sets the time)"
        ) from error
    return dict(json.loads(found))


def _host() -> str:
    """What processes have in common that can share memory: boot, network namespace, user.

    Abstract sockets belong to a network namespace, so containers may share a host and not meet.
    PURLIN_HOST takes its place, for tests of several hosts on one.
    """
    if given := os.environ.get("PURLIN_HOST"):
        return given
    boot = Path("/proc/sys/kernel/random/boot_id")
    identity = boot.read_text().strip() if boot.exists() else os.uname().nodename
    space = Path("/proc/self/ns/net")
    return f"{identity} {os.readlink(space) if space.exists() else ''} {os.getuid()}"
