"""XLA captures the calls into command buffers, and replays give the right values."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.harness import run_program

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]


def test_calls_stand_inside_a_command_buffer(tmp_path: Path) -> None:
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    run_program("captured", "200", timeout=120, XLA_FLAGS=flags)
    thunks = [f.read_text() for f in tmp_path.glob("*jit_body*thunk_sequence_after*")]
    assert thunks, sorted(f.name for f in tmp_path.iterdir())
    top_level = [line for text in thunks for line in text.splitlines() if line[:1].isdigit()]
    assert any("kCommandBuffer" in line for line in top_level), top_level
    assert not any("kCustomCall" in line for line in top_level), top_level


def test_scan_of_10000() -> None:
    run_program("scan", "10000", timeout=120)


def test_unrolled_200() -> None:
    run_program("captured", "200", timeout=120)
