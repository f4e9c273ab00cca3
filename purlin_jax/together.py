"""Runs a command in several processes of this machine, which share its CPU devices or its GPUs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import jax

from purlin_jax import domain

_BUDGET_S = 600.0
_SHARE = 0.8  # of a GPU's memory, for all processes that share it


def run(arguments: Sequence[str], count: int, platform: str, devices: int | None) -> int:
    """The exit status of `python -m purlin_jax ARGUMENTS` in `count` processes.

    Args:
      devices: on the CPU, of all processes together; by default 8. On GPUs every process has one,
        and they share GPUs if there are fewer, as long as no collective of jax.lax runs: NCCL takes
        no two processes on one GPU.
    """
    devices = devices or (8 if platform == "cpu" else count)
    if devices % count or (platform != "cpu" and devices != count):
        print(f"{devices} devices do not divide over {count} processes", file=sys.stderr)
        return 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "purlin_jax", *arguments, "--member"]
    members = [
        subprocess.Popen(
            [*command, f"{i},{count},{port},{devices // count}"],
            env={**os.environ, **_environment(i, count, platform)},
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


def _environment(process: int, count: int, platform: str) -> dict[str, str]:
    if platform == "cpu":
        return {"JAX_PLATFORMS": "cpu"}
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = given.split(",") if given else [str(i) for i in range(domain.cuda.count())]
    sharing = -(-count // len(gpus))
    own = {"CUDA_VISIBLE_DEVICES": gpus[process % len(gpus)]}
    if sharing > 1:
        own["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{_SHARE / sharing:.3f}"
    return own


def join(member: str, platform: str) -> None:
    """Become one of the processes: "number,count,port,devices"."""
    number, count, port, devices = map(int, member.split(","))
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
