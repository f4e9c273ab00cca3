"""First runs, re-recording and threads neither deadlock nor mix data while a peer waits."""

from __future__ import annotations

import pytest

from tests.gpu.harness import run_program

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]


def test_libraries_modules_and_memory_while_a_peer_waits() -> None:
    run_program("first_use", timeout=180)


def test_fresh_executables() -> None:
    run_program("fresh_executables", "1000", timeout=400)


@pytest.mark.parametrize("preallocate", ["false", "true"])
def test_one_device_records_again(preallocate: str) -> None:
    run_program(
        "alternating_buffers", "300", timeout=180, XLA_PYTHON_CLIENT_PREALLOCATE=preallocate
    )


def test_two_threads() -> None:
    run_program("threads", "5000", timeout=300)


def test_platform_allocator() -> None:
    """Every buffer is an allocation of its own, which may wait for the device."""
    run_program("alternating_buffers", "50", timeout=180, XLA_PYTHON_CLIENT_ALLOCATOR="platform")
