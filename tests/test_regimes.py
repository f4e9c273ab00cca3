"""The suites of parity with jax.lax pass in each regime that fits, and that regime runs alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from purlin_jax import _native
from purlin_jax.policy import table

SUITES = {
    "all_to_all": ("tests/test_all_to_all.py",),
    "all_reduce": ("tests/test_all_reduce.py", "tests/test_dtypes.py"),
}
TINY = 1 << 12  # bytes of staging: many of the arrays take several rounds
# What packets have no room for, by their marks; every other regime must leave out nothing.
BEYOND_PACKETS = 6
POLICIES = [
    *(
        regime for regime in table("cpu")["regimes"] if regime != "meet"
    ),  # which the CPU has run already
    f"staged:2:{TINY}",
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs keep what XLA compiled: jax.lax's half is the same in all of them."""
    return tmp_path_factory.mktemp("compiled")


def _pytest(regime: str, cache: Path, *tests: str) -> tuple[int, str]:
    """The exit status and the report of `tests` under --regime in a process of their own."""
    caching = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--regime", regime, *tests],
        cwd=Path(__file__).parents[1],
        env={**os.environ, **caching},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("policy", POLICIES)
def test_parity(policy: str, cache: Path) -> None:
    regime = policy.split(":")[0]
    fitting = {op: files for op, files in SUITES.items() if op in _native.regimes[regime][0]}
    status, report = _pytest(policy, cache, *(f for files in fitting.values() for f in files))
    assert status == pytest.ExitCode.OK, report
    ran = re.findall(r"^(\w+) in (\w+): \d+ native calls$", report, re.MULTILINE)
    assert sorted(ran) == sorted((op, regime) for op in fitting), report
    skipped = re.findall(r"(\d+) skipped", report)
    assert skipped == ([str(BEYOND_PACKETS)] if regime == "packet" else []), report


@pytest.mark.parametrize(
    ("regime", "test", "fault"),
    (
        # It forces another regime itself.
        ("packet", "test_policy.py::test_all_gather_in_each_regime[3-meet-1-0]", "ran meet too"),
        # It makes no call.
        ("packet", "test_all_to_all.py::test_no_axis_is_the_identity", "ran no native call"),
        # The knobs arrive, too.
        ("staged:2:64", "test_all_reduce.py::test_axis_index_groups", "64 bytes of staging are"),
        ("staged:65", "test_all_reduce.py::test_axis_index_groups", "blocks=65 is outside"),
        # What does not fit raises.
        ("composed", "test_all_to_all.py::test_odd_numbers_of_bytes[1]", "for all_reduce alone"),
    ),
)
def test_a_run_in_another_regime_fails(regime: str, test: str, fault: str, cache: Path) -> None:
    status, report = _pytest(regime, cache, f"tests/{test}")
    assert status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), report
    assert fault in report
