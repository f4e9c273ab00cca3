"""Collectives between GPUs of several processes, which share GPUs where there are few."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.launcher import Job, leaves_nothing, run, run_with_a_cache

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
    program: str, *args: Any, count: int = 2, seconds: float = 60, own: Any = None, **env: str
) -> list[str]:
    gpus = len(jax.devices("gpu"))
    where = {"count": count, "devices": 1, "gpus": gpus}
    return run(program, *args, seconds=seconds, own=own, env=env, **where)


@pytest.mark.parametrize("count", (2, 3))
def test_values(count: int) -> None:
    on_gpus("everything", *REGIMES, count=count)


def test_replays() -> None:
    on_gpus("chained", 100)


def test_growing_pool() -> None:
    for output in on_gpus("growing", XLA_PYTHON_CLIENT_PREALLOCATE="false"):
        assert "LENDS True" in output


def test_every_slow_call_is_reported() -> None:
    waiting, late = on_gpus("slow", PURLIN_SLOW_S="1")
    calls = re.findall(r"slow: all_reduce call (\d+) at all_reduce in process_faults", waiting)
    assert calls == ["2", "3"], waiting
    assert "slow" not in late


@pytest.mark.parametrize("allocator", ("cuda_async", "platform"))
def test_arrays_that_cannot_be_lent(allocator: str) -> None:
    on_gpus("without_lending", XLA_PYTHON_CLIENT_ALLOCATOR=allocator)


def test_full_arena() -> None:
    """All processes find out, and would go to jax.lax together."""
    for output in on_gpus("full", PURLIN_ARENA_MB="16"):
        assert "holds no window for another partition" in output


def test_process_that_does_not_join() -> None:
    zero, one = on_gpus("absent", PURLIN_JOIN_S="2")
    assert zero.count("purlin: process 1 did not come within 2 s") == 2, zero
    for output in (zero, one):
        assert json.loads(output.partition("STEP third ")[2].splitlines()[0])["error"] == "", output


def test_strangers() -> None:
    assert all("RIGHT" in output for output in on_gpus("stranger"))


def test_program_out_of_a_cache_of_one_process(tmp_path: Path) -> None:
    """XLA shares the search for fast kernels among processes: with that, any program hangs where
    one process takes it from a cache and another compiles it."""
    alone = {"XLA_FLAGS": "--xla_gpu_shard_autotuning=false"}
    run_with_a_cache(partial(on_gpus, **alone), tmp_path)


def test_many_calls_leave_nothing() -> None:
    for output in on_gpus("many", 1000):
        leaves_nothing(output)


def test_starts_and_stops() -> None:
    for _ in range(4):
        on_gpus("once", count=3)


def told(job: Job, i: int, step: str = "fault") -> dict[str, Any]:
    job.wait_for(i, f"STEP {step}", 60)
    return dict(json.loads(job.output(i).partition(f"STEP {step} ")[2].splitlines()[0]))


@pytest.mark.parametrize(
    ("what", "texts"),
    (
        ("late", ("gave up: all_reduce call", "waiting for rank 1 (process 1)")),
        ("shapes", ("ranks disagree: all_reduce call", "process_faults.py:")),
        ("counts", ("bad counts: all_to_all_v call", "rank 1")),
        ("killed", ("lost: all_reduce call", "process 1 has ended")),
        ("exits", ("lost: all_reduce call", "process 1 has ended")),
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
