"""Collectives between the CPU devices of several processes: values, order, and what is left."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from tests.launcher import Job, leaves_nothing, run, run_with_a_cache

STARTS = 8  # and stops in a row; as many as one likes
CALLS = 3000  # of one program, in a row


@pytest.mark.parametrize(("count", "devices"), ((2, 2), (3, 1)))
def test_values(count: int, devices: int) -> None:
    regimes = ("auto", "packet", "staged", "composed")
    run("everything", *regimes, count=count, devices=devices)


def test_values_of_eight_processes() -> None:
    run("small", count=8, devices=1, seconds=120)


def test_order() -> None:
    """XLA runs independent collectives in another order on each device."""
    run("order", env={"PURLIN_TIMEOUT_S": "30"})


def test_programs_of_two_threads() -> None:
    """Right data or an error, and an end: devices may start the programs in another order."""
    for output in run("by_threads", seconds=30, env={"PURLIN_TIMEOUT_S": "3"}):
        for line in output.splitlines():
            assert not line.startswith("ERROR") or "all_reduce at process_runs.py" in line


def test_meshes_of_different_processes() -> None:
    for output in run("two_meshes", count=4, devices=1, env={"PURLIN_TIMEOUT_S": "10"}):
        assert "APART" in output


def test_program_out_of_a_cache_of_one_process(tmp_path: Path) -> None:
    """XLA numbers the runs of such a program otherwise."""
    run_with_a_cache(partial(run, env={"PURLIN_TIMEOUT_S": "10"}), tmp_path)


def test_many_calls_leave_nothing() -> None:
    for output in run("many", CALLS):
        leaves_nothing(output)


def test_starts_and_stops_leave_nothing() -> None:
    for _ in range(STARTS):
        with Job("once") as job:
            job.finish()
            pids = [process.pid for process in job.processes.values()]
        sockets = Path("/proc/net/unix").read_text()
        assert not [pid for pid in pids if f"@purlin-{pid}-" in sockets]
        assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
