"""Joins the processes of each host, whose CPU devices share a mesh, over jax.distributed."""

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


def hosts() -> list[int]:
    """The host of each process of the job, by its first process.

    Shares memory with the processes of the own host, once. Waits for each process of the job for
    PURLIN_JOIN_S (300) seconds.

    Raises:
      RuntimeError: a process does not come; the message names it.
    """
    with _lock:
        return _hosts()


@cache
def _hosts() -> list[int]:
    store = _compat.key_value_store()
    if store is None:
        raise RuntimeError("purlin: several processes need jax.distributed.initialize")
    own, count = jax.process_index(), jax.process_count()
    _announce(store, own)
    everybody = [_read(store, process) for process in range(count)]
    names = [other["host"] for other in everybody]
    found = [names.index(name) for name in names]
    here = [p for p in range(count) if found[p] == found[own]]
    if len(here) > 1:
        if own != here[0]:  # who leads listens before others connect
            _read(store, here[0], "/listens")
        _start(here.index(own), len(here), everybody[here[0]])
        if own == here[0]:
            _publish(store, f"{own}/listens", {})
    return found


@cache
def _announce(store: Any, own: int) -> None:
    """Tell the others that this process is here; once, also where one tries again."""
    me = {
        "host": _host(),
        "name": f"purlin-{os.getpid()}-{secrets.token_hex(8)}",
        "token": secrets.token_hex(16),
    }
    _publish(store, str(own), me)


def _publish(store: Any, key: str, what: dict[str, str]) -> None:
    store.key_value_set(f"{_PREFIX}/{key}", json.dumps(what))


def _start(own: int, count: int, leader: dict[str, str]) -> None:
    megabytes = int(os.environ.get("PURLIN_SHM_MIB", "65536"))  # of addresses; used as touched
    _native.join(own, count, leader["name"], leader["token"], megabytes << 20)


def on_their_hosts() -> list[int]:
    """Each process's number among those of its host."""
    found = hosts()
    return [found[:process].count(host) for process, host in enumerate(found)]


def _read(store: Any, process: int, what: str = "") -> dict[str, Any]:
    seconds = float(os.environ.get("PURLIN_JOIN_S", "300"))
    try:
        found = store.blocking_key_value_get(f"{_PREFIX}/{process}{what}", int(seconds * 1000))
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
