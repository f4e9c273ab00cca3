"""Joins the processes of one host whose CPU devices share a mesh, over jax.distributed."""

from __future__ import annotations

import json
import os
import secrets
import threading
from functools import cache
from pathlib import Path
from typing import Any

import jax

from purlin_jax import _compat, _native

_PREFIX = "purlin/shm"
_lock = threading.Lock()  # programs may be lowered by several threads


def join() -> str | None:
    """Share memory with all other processes of the job; once. Why that cannot be, or None.

    All processes come to the same answer. Waits for each of them for PURLIN_JOIN_S (300) seconds.

    Raises:
      RuntimeError: a process does not come; the message names it.
    """
    with _lock:
        return _join()


@cache
def _join() -> str | None:
    store = _compat.key_value_store()
    if store is None:
        return "jax.distributed has not been initialised"
    own, count = jax.process_index(), jax.process_count()
    _announce(store, own, count)
    everybody = [_read(store, process) for process in range(count)]
    for process, other in enumerate(everybody):
        if other["host"] != everybody[0]["host"]:
            return f"processes 0 and {process} run on different hosts"
        if other["user"] != everybody[0]["user"]:
            return f"processes 0 and {process} belong to different users"
    if own != 0:
        _start(own, count, everybody[0])
    return None


@cache
def _announce(store: Any, own: int, count: int) -> None:
    """Tell the others that this process is here; once, also where one tries again to join."""
    me: dict[str, Any] = {"host": _host(), "user": os.getuid()}
    if own == 0:
        token = secrets.token_hex(16)
        me |= {"name": f"purlin-{os.getpid()}-{secrets.token_hex(8)}", "token": token}
        # Process 0 listens before anybody reads where.
        _start(own, count, me)
    store.key_value_set(f"{_PREFIX}/{own}", json.dumps(me))


def _start(own: int, count: int, leader: dict[str, Any]) -> None:
    megabytes = int(os.environ.get("PURLIN_SHM_MIB", "65536"))  # of addresses; used as touched
    _native.join(own, count, leader["name"], leader["token"], megabytes << 20)


def _read(store: Any, process: int) -> dict[str, Any]:
    seconds = float(os.environ.get("PURLIN_JOIN_S", "300"))
    try:
        found = store.blocking_key_value_get(f"{_PREFIX}/{process}", int(seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"purlin: process {process} did not come within {seconds:g} s; all processes must run "
            "the same program (PURLIN_JOIN_S sets the time)"
        ) from error
    return dict(json.loads(found))


def _host() -> str:
    """What processes have in common that can share memory: the boot, and the network namespace.

    Abstract sockets belong to a network namespace, so containers may share a host and not meet.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    identity = boot.read_text().strip() if boot.exists() else os.uname().nodename
    space = Path("/proc/self/ns/net")
    return f"{identity} {os.readlink(space) if space.exists() else ''}"
