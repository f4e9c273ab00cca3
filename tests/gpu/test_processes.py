"""Collectives between GPUs of several processes, which share GPUs where there are few."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import jax
import pytest

from tests.launcher import Job, run

pytestmark = pytest.mark.gpu

BUDGET = 5
LIMITS = {"PURLIN_TIMEOUT_S": str(BUDGET), "PURLIN_SLOW_S": "1"}
REGIMES = (
    "auto",
    "packet",
    "line",
    "staged",
    "composed",
    "zero_staging:generic",
    "zero_staging:ampere",
    "zero_staging:hopper",
    "zero_staging_push:generic",
    "zero_staging_push:hopper",
    "zero_staging_composed:generic",
    "zero_staging_composed:hopper",
)


def on_gpus(
    program: str, *args: Any, count: int = 2, seconds: float = 240, **env: str
) -> list[str]:
    gpus = len(jax.devices("gpu"))
    return run(program, *args, count=count, devices=1, gpus=gpus, env=env, seconds=seconds)


@pytest.mark.parametrize("count", (2, 3))
def test_values(count: int) -> None:
    on_gpus("everything", *REGIMES, count=count)


def test_replays() -> None:
    on_gpus("chained", 100)


def test_growing_pool() -> None:
    for output in on_gpus("growing", XLA_PYTHON_CLIENT_PREALLOCATE="false"):
        assert "LENDS True" in output


@pytest.mark.parametrize("allocator", ("cuda_async", "platform"))
def test_arrays_that_cannot_be_lent(allocator: str) -> None:
    on_gpus("without_lending", XLA_PYTHON_CLIENT_ALLOCATOR=allocator)


def told(job: Job, i: int, step: str = "fault") -> dict[str, Any]:
    job.wait_for(i, f"STEP {step}", 60)
    return dict(json.loads(job.output(i).partition(f"STEP {step} ")[2].splitlines()[0]))


@pytest.mark.parametrize(
    ("what", "texts"),
    (
        ("late", ("gave up: all_reduce call", "waiting for rank 1 (process 1)")),
        ("shapes", ("ranks disagree: all_reduce call", "process_faults.py:")),
        ("counts", ("bad counts: all_to_all_v call", "rank 1")),
        ("killed", ("process 1 has ended",)),
        ("exits", ("process 1 has ended",)),
    ),
)
def test_faults(what: str, texts: tuple[str, ...]) -> None:
    """An error in time, after a report that names the ranks; what comes later fails too."""
    gpus = len(jax.devices("gpu"))
    with Job("fault", what, devices=1, gpus=gpus, env=LIMITS) as job:
        if what == "killed":
            for i in job.processes:
                job.wait_for(i, "READY", 120)
            time.sleep(1)
            os.kill(job.processes[1].pid, signal.SIGKILL)
        killed = time.time()
        found = told(job, 0)
        assert found["error"], found
        for text in texts:
            assert text in job.output(0), job.output(0)
        assert found["seconds"] < BUDGET + 5 if what != "killed" else found["at"] - killed < 5, (
            found
        )
