"""The programs of tests/gpu/test_beside_lax.py on virtual CPU devices, with fewer steps."""

from __future__ import annotations

import pytest

from tests.gpu.harness import run_program
from tests.memory import NEEDS_GLIBC


@pytest.mark.own_regime
@pytest.mark.parametrize(
    ("module", "program", "count"),
    [
        ("mixed_programs", "beside", 300),
        ("mixed_programs", "rings", 300),
        ("mixed_programs", "inserted", 200),
        pytest.param("long_programs", "many_calls", 2000, marks=NEEDS_GLIBC),
        pytest.param("long_programs", "many_shapes", 50, marks=NEEDS_GLIBC),
    ],
)
def test_program(module: str, program: str, count: int) -> None:
    virtual = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    run_program(program, str(count), module=module, timeout=120, **virtual)
