"""Faults of collectives between several processes: an error on all in time, and life after it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.launcher import Job, run

BUDGET = 3
LIMITS = {"PURLIN_TIMEOUT_S": str(BUDGET), "PURLIN_SLOW_S": "1"}
REDUCE = "all_reduce at process_faults.py:"


def steps(output: str) -> dict[str, dict[str, Any]]:
    """What `attempt` printed, by step."""
    lines = [line.split(" ", 2) for line in output.splitlines() if line.startswith("STEP ")]
    return {step: json.loads(told) for _, step, told in lines}


def check(told: dict[str, Any], *texts: str, seconds: float = BUDGET + 5) -> None:
    """An error with these texts came in time, and the last report tells of it too."""
    for text in texts:
        assert text in told["error"], told
        assert text in told["report"], told
    assert told["seconds"] < seconds, told


def test_faults_that_processes_survive() -> None:
    outputs = run("survived", env=LIMITS)
    assert all("SURVIVED" in output for output in outputs)
    zero, one = map(steps, outputs)
    for told in (zero, one):
        check(told["late-host"], "gave up", REDUCE, "waits for rank 2, 3 (process 1)")
    assert zero["late-host"]["seconds"] > BUDGET - 1
    check(zero["late-rank"], "gave up", REDUCE, "waits for rank 2, 3 (process 1)")
    check(one["late-rank"], "gave up", REDUCE, "waits for rank 3 since")
    for told in (zero, one):
        check(told["shapes"], REDUCE, "ranks disagree: process", "float32[4,4]", "float32[5,4]")
        counts = "bad counts: what rank 1 sends to rank 0 ends at row 99"
        check(told["counts"], "all_to_all_v at process_faults.py:", counts, seconds=BUDGET - 0.5)
        check(told["again"], "an earlier collective of these ranks failed", counts)
    assert "slow: all_reduce" in outputs[0] and "slow: all_reduce" in outputs[1]


# Who hears of it at once says so within two seconds, and JAX may end the others after that.
AT_ONCE = 2


@pytest.mark.parametrize(
    ("what", "count", "devices", "texts"),
    (
        ("between", 2, 2, ("process 1 has ended", "rank 2, 3 (process 1)")),
        ("during", 2, 2, ("process 1 has ended",)),
        ("during", 3, 1, ("process 1 has ended",)),
    ),
)
def test_killed_process(what: str, count: int, devices: int, texts: tuple[str, ...]) -> None:
    with Job("killed", what, count=count, devices=devices, env=LIMITS) as job:
        for i in job.processes:
            job.wait_for(i, "READY")
        time.sleep(random.uniform(0.5, 1))
        killed = time.time()
        os.kill(job.processes[1].pid, signal.SIGKILL)
        for i in set(job.processes) - {1}:
            job.wait_for(i, "STEP killed", 20)
            told = steps(job.output(i))["killed"]
            check(told, REDUCE, *texts, seconds=60)
            assert told["at"] - killed < AT_ONCE, job.outputs()
        if what == "between":
            job.wait_for(0, "STEP later", 20)
            check(steps(job.output(0))["later"], "process 1 has ended")


def test_killed_process_with_a_fork() -> None:
    """What it has forked off does not hide its end."""
    with Job("killed", "forked", env=LIMITS) as job:
        child = int(job.wait_for(1, "CHILD"))
        job.wait_for(0, "READY")
        killed = time.time()
        os.kill(job.processes[1].pid, signal.SIGKILL)
        job.wait_for(0, "STEP killed", 20)
        told = steps(job.output(0))["killed"]
        os.kill(child, signal.SIGKILL)  # it was there until now
        check(told, REDUCE, "process 1 has ended", seconds=60)
        assert told["at"] - killed < AT_ONCE, job.outputs()


def test_killed_first_process() -> None:
    """JAX ends the others too: they do not hang."""
    with Job("killed", "during", env=LIMITS) as job:
        for i in job.processes:
            job.wait_for(i, "READY")
        time.sleep(random.uniform(0.3, 0.6))
        os.kill(job.processes[0].pid, signal.SIGKILL)
        job.finish(BUDGET + 5, ends_well=())


@pytest.mark.parametrize("silent", (0, 1))
@pytest.mark.parametrize("what", ("between", "during"))
def test_process_that_stops(what: str, silent: int) -> None:
    """The others hear of it in time, and so does the process once it goes on."""
    with Job("killed", what, silent, env=LIMITS) as job:
        for i in job.processes:
            job.wait_for(i, "READY")
        stopped = time.time()
        os.kill(job.processes[silent].pid, signal.SIGSTOP)
        job.wait_for(1 - silent, "STEP killed", 20)
        told = steps(job.output(1 - silent))["killed"]
        assert "gave up" in told["error"] and REDUCE in told["error"], told
        assert f"process {silent}" in told["error"], told
        assert told["at"] - stopped < BUDGET + 5, told
        assert "slow: all_reduce" in job.output(1 - silent)
        if what == "during":
            os.kill(job.processes[silent].pid, signal.SIGCONT)
            job.wait_for(silent, "STEP killed", BUDGET + 5)
            assert steps(job.output(silent))["killed"]["error"]


@pytest.mark.parametrize(
    ("what", "seconds", "text"),
    (
        ("leaves", BUDGET + 5, "waits for rank 2, 3 (process 1)"),  # JAX keeps it until all end
        ("exits", 1 + AT_ONCE, "process 1 has ended, and its ranks did not arrive"),
    ),
)
def test_process_that_ends_while_others_wait(what: str, seconds: float, text: str) -> None:
    with Job("killed", what, env=LIMITS) as job:
        job.wait_for(0, "STEP killed")
        check(steps(job.output(0))["killed"], REDUCE, text, "(process 1)", seconds=seconds)


def test_process_that_does_not_join() -> None:
    zero, one = map(steps, run("absent", env={"PURLIN_JOIN_S": "2"}))
    for step in ("first", "second"):
        assert "purlin: process 1 did not come within 2 s" in zero[step]["error"]
        assert zero[step]["seconds"] < 7
    assert zero["third"]["error"] == one["third"]["error"] == ""


JOIN = """
import sys
from purlin_jax import _native
process, name, seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
try:
    _native.join(process, 2, name, "token", 1 << 20, seconds)
    print("JOINED", flush=True)
except RuntimeError as error:
    print("ERROR", error, flush=True)
sys.stdin.read()
"""


def test_joining_a_stopped_process() -> None:
    """It takes the connection, since the system does that, and does not answer."""
    name = f"purlin-test-{os.getpid()}"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}

    def start(process: int, seconds: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", JOIN, str(process), name, str(seconds)]
        return subprocess.Popen(command, **pipes)

    with start(0, 60) as first:
        try:
            assert first.stdout is not None and first.stdout.readline() == "JOINED\n"
            os.kill(first.pid, signal.SIGSTOP)
            began = time.monotonic()
            with start(1, 1.5) as second:
                told, _ = second.communicate(timeout=60)
            assert "process 0 did not answer within 1.50 s" in told, told
            assert "PURLIN_JOIN_S" in told and time.monotonic() - began < 1.5 + 20
        finally:
            first.kill()


def test_refused_group() -> None:
    for output in run("refused", count=4, devices=1, env=LIMITS):
        told = steps(output)["again"]
        check(told, "an earlier collective of these ranks failed", seconds=BUDGET - 0.5)


def test_full_memory() -> None:
    for output in run("full", env={"PURLIN_SHM_MIB": "1", **LIMITS}):
        full = "the shared memory is full; raise PURLIN_SHM_MIB"
        check(steps(output)["full"], REDUCE, full, seconds=2)


def test_strangers() -> None:
    """Who connects to the socket without the token of the job is refused, and does no harm."""
    assert all("RIGHT" in output for output in run("stranger", env=LIMITS))
