"""A wait that outlasts its budget ends in a report and an error, never in a hang."""

from __future__ import annotations

import time

import pytest

from tests.gpu.harness import run_program

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]


def test_late_rank_is_reported_before_the_error() -> None:
    start = time.monotonic()
    result = run_program("late_rank", "60", "5", timeout=120, check=False)
    took = time.monotonic() - start
    assert result.returncode != 0
    assert "no error" not in result.stdout
    assert "purlin: gave up: all_reduce call" in result.stderr, result.stderr[-3000:]
    assert "rank 0 of 2" in result.stderr and "waiting for rank 1" in result.stderr
    assert "programs.py:" in result.stderr  # the call site
    assert "purlin: slow: all_reduce" in result.stderr
    if "REPORT" in result.stdout:  # XLA may end the process itself; then there is no Python error
        assert "REPORT purlin: gave up" in result.stdout
    assert took < 110, took


def test_late_rank_within_the_budget_is_waited_for() -> None:
    result = run_program("late_rank", "3", "60", timeout=120)
    assert "no error" in result.stdout
    assert "purlin: slow: all_reduce" in result.stderr
