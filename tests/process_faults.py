"""Programs of several processes that meet faults, and print what came of it."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import purlin_jax as purlin
from purlin_jax import _compat
from tests.process_programs import Fn, mesh_of, numbers, over, put, same


def attempt(step: str, f: Fn, *args: Any) -> None:
    """Print whether f(*args) ends in an error, when, and what the last report is."""
    begin, error = time.monotonic(), ""
    try:
        jax.block_until_ready(f(*args))
    except (RuntimeError, ValueError) as raised:  # of inline execution: ValueError
        error = str(raised)
    told = {
        "seconds": time.monotonic() - begin,
        "at": time.time(),
        "error": error,
        "report": purlin.last_report(),
    }
    print(f"STEP {step} {json.dumps(told)}", flush=True)


def sync(name: str) -> None:
    _compat.key_value_store().wait_at_barrier(f"test {name}", 60_000)


def reduced(mesh: Any) -> Fn:
    return over(lambda v: purlin.all_reduce(v, mesh.axis_names), mesh)


def works(mesh: Any, seed: int = 0) -> None:
    """A collective over the mesh gives the right values."""
    x = numbers(np.float32, (mesh.size * 3, 5), seed)
    total = np.stack(np.split(x, mesh.size)).sum(0)
    same(reduced(mesh)(put(x, mesh)), np.concatenate([total] * mesh.size))


def bad(v: jax.Array, wrong: jax.Array) -> Any:
    """A step whose group along "b" fails where `wrong` holds: it sends more rows than it has."""
    sizes = jnp.where(wrong[0], 99, 1) * jnp.ones(2, jnp.int32)
    y, _ = purlin.all_to_all_v(v, sizes, "b", capacity=8)
    return purlin.all_reduce(y, ("a", "b"))


def survived() -> None:
    """Ranks that come late, differ in shape, or bring bad counts: errors on all, and life after."""
    mesh, own = mesh_of(), jax.process_index()
    n = mesh.size
    x = put(numbers(np.float32, (n * 4, 4)), mesh)
    works(mesh)

    sync("late host")
    if own == 1:
        time.sleep(5)
    attempt("late-host", reduced(mesh), x)

    def slow(v: jax.Array) -> jax.Array:
        def nap(i: Any) -> Any:
            time.sleep(5 if i == n - 1 else 0)
            return np.float32(0)

        zero = jax.pure_callback(nap, jax.ShapeDtypeStruct((), np.float32), jax.lax.axis_index("x"))
        return purlin.all_reduce(v + zero, "x")

    sync("late rank")
    attempt("late-rank", over(slow, mesh), x)
    sync("works 1")
    works(mesh, 1)

    sync("shapes")
    other = put(numbers(np.float32, (n * (4 + own), 4)), mesh)
    attempt("shapes", reduced(mesh), other)
    sync("works 2")
    works(mesh, 2)

    grid = mesh_of(("a", "b"), (n // 2, 2), [0, 2, 1, 3])  # groups of axis b cross the processes

    sync("counts")
    where = put(np.arange(n) == 1, grid)  # one rank of the first group
    x = put(numbers(np.float32, (n * 4, 4)), grid)
    attempt("counts", over(bad, grid), x, where)
    sync("again")
    attempt("again", over(bad, grid), x, put(np.zeros(n, bool), grid))
    sync("works 3")
    works(mesh, 3)
    print("SURVIVED", flush=True)
    sync("end")
    time.sleep(0 if own else 0.5)  # JAX ends processes that outlive process 0
    os._exit(0)  # it would wait for the effects of the programs that failed


def killed(what: str, silent: str = "1") -> None:
    """A process of which the others hear no more: before, between or in collectives."""
    mesh, own = mesh_of(), jax.process_index()
    works(mesh)
    x = put(numbers(np.float32, (mesh.size << 20, 2 if what == "during" else 1)), mesh)
    with purlin.policy("staged", staging_bytes=4096):
        program = reduced(mesh)

        def rounds() -> None:
            for _ in range(100_000):
                program(x).block_until_ready()

        program(x).block_until_ready()
        print("READY", flush=True)
        if what == "during":
            attempt("killed", rounds)
        elif own != int(silent):
            attempt("killed", program, x)
            if what != "leaves":
                attempt("later", program, x)
        elif what == "leaves":
            return
        elif what == "exits":
            time.sleep(1)
            os._exit(0)
        elif what == "forked":
            if (child := os.fork()) == 0:
                time.sleep(20)
                os._exit(0)
            print("CHILD", child, flush=True)
            time.sleep(60)
        else:
            time.sleep(60)
    sys.stdout.flush()
    os._exit(0)  # what JAX does about the lost process is not the matter


def absent() -> None:
    """A process that has nothing to do with purlin at first."""
    mesh, own = mesh_of(), jax.process_index()
    if own == 0:
        attempt("first", works, mesh)
        attempt("second", works, mesh)
    sync("comes")
    attempt("third", works, mesh)


def refused() -> None:
    """A group that failed is refused in the next run, whose other ranks must not wait for it."""
    grid = mesh_of(("a", "b"), (2, 2))
    n = grid.size

    x = put(numbers(np.float32, (n * 4, 4)), grid)
    attempt("counts", over(bad, grid), x, put(np.arange(n) == 1, grid))
    sync("again")
    attempt("again", over(bad, grid), x, put(np.zeros(n, bool), grid))
    sync("end")
    time.sleep(0 if jax.process_index() else 0.5)
    os._exit(0)


def full() -> None:
    mesh = mesh_of()
    attempt("full", works, mesh)


def stranger() -> None:
    """Who connects without being one of the processes is turned away."""
    mesh = mesh_of()
    works(mesh)
    told = json.loads(_compat.key_value_store().blocking_key_value_get("purlin/processes/0", 1000))
    at = f"\0{told['name']}-{mesh.devices.flat[0].platform}"

    def text(value: str) -> bytes:
        return ctypes.c_int64(len(value)).value.to_bytes(8, "little") + value.encode()

    def number(value: int) -> bytes:
        return value.to_bytes(8, "little", signed=True)

    greetings = {
        "wrong token": text("0" * 32) + number(1),
        "no number": text(told["token"]),
        "no such process": text(told["token"]) + number(99),
        "negative": text(told["token"]) + number(-1),
        "twice": text(told["token"]) + number(1),
        "short": b"\1",
        "endless text": number(1 << 62),
    }
    for what, message in greetings.items():
        for head in ((len(message), 0), (1 << 60, 0), (len(message), 1)):  # bytes and descriptors
            raw = number(head[0]) + number(head[1]) + message
            with socket.socket(socket.AF_UNIX) as end:
                end.settimeout(5)
                end.connect(at)
                end.sendall(raw)
                try:
                    answer, files, *_ = socket.recv_fds(end, 1, 1)
                except ConnectionResetError:
                    answer, files = b"", []
                assert (answer, files) == (b"", []), what
    silent = socket.socket(socket.AF_UNIX)  # stays open, and says nothing
    silent.connect(at)
    sync("strangers")
    for seed in range(5):
        works(mesh, seed)
    silent.close()
    print("RIGHT", flush=True)


PROGRAMS: dict[str, Fn] = {
    f.__name__: f for f in (survived, killed, absent, refused, full, stranger)
}
