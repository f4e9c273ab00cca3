"""purlin and jax.lax in one program, for ten thousand steps; long runs in which memory stays."""

from __future__ import annotations

import pytest

from tests.gpu.harness import run_program

SCHEDULER = "--xla_gpu_enable_latency_hiding_scheduler"


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.parametrize("scheduler", ["true", "false"])
@pytest.mark.parametrize("program", ["beside", "rings", "inserted"])
def test_ten_thousand_steps(program: str, scheduler: str) -> None:
    flags = f"{SCHEDULER}={scheduler}"
    run_program(program, "10000", module="mixed_programs", timeout=300, XLA_FLAGS=flags)


@pytest.mark.gpu
def test_100_000_calls_leave_memory_as_it_was() -> None:
    run_program("many_calls", "100000", module="long_programs", timeout=300)


@pytest.mark.gpu
@pytest.mark.timeout(960)
def test_5_000_shapes_leave_memory_as_it_was() -> None:
    run_program("many_shapes", "5000", module="long_programs", timeout=900)
