"""Helpers of the GPU tests: meshes of GPUs, and programs that need a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

P = jax.P


def gpus(order: Sequence[int] | None = None, names: Sequence[str] = ("x",)) -> Mesh:
    """All GPUs along one axis, in `order` if given."""
    devices = np.array(jax.devices("gpu"))
    return Mesh(devices[list(order)] if order is not None else devices, tuple(names))


def sharded(f: Any, mesh: Mesh, **kwargs: Any) -> Any:
    """jit of f in shard_map along the first axis of every array."""
    spec = P(mesh.axis_names)
    options = {"in_specs": spec, "out_specs": spec, "check_vma": False, **kwargs}
    return jax.jit(jax.shard_map(f, mesh=mesh, **options))


def run_program(
    *args: str, timeout: float, check: bool = True, module: str = "programs", **env: str
) -> subprocess.CompletedProcess[str]:
    """`python -m tests.gpu.MODULE ARGS` in a process of its own, in strict mode.

    A process of its own because these tests are about first use, allocators or errors that end the
    context. A hang is a failure: the process is ended after `timeout` seconds.
    """
    full = {**os.environ, "PURLIN_FALLBACK": "error", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    result = subprocess.run(
        [sys.executable, "-m", f"tests.gpu.{module}", *args],
        env={**full, **env},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if check:
        assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result
