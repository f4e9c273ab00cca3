"""Runs the self-test in several processes of this machine, which share the CPU devices."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import jax

_BUDGET_S = 600.0


def run(count: int, devices: int) -> int:
    """The exit status of `count` processes that hold `devices` CPU devices together."""
    if devices % count:
        print(f"{devices} devices do not divide over {count} processes", file=sys.stderr)
        return 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "purlin_jax", "selftest", "--platform", "cpu", "--member"]
    members = [
        subprocess.Popen(
            [*command, f"{i},{count},{port},{devices // count}"],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        for i in range(count)
    ]
    deadline = time.monotonic() + _BUDGET_S
    try:
        return max(abs(m.wait(max(0.0, deadline - time.monotonic()))) for m in members)
    except subprocess.TimeoutExpired:
        print(f"the processes did not end within {_BUDGET_S:g} s", file=sys.stderr)
        return 1
    finally:
        for member in members:
            member.kill()


def join(member: str) -> None:
    """Become one of the processes: "number,count,port,devices"."""
    number, count, port, devices = map(int, member.split(","))
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
