"""C++ without JAX: protocol and link under real threads and ThreadSanitizer; reductions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLAGS = {"plain": "-O2", "tsan": "-O1 -g1 -fsanitize=thread"}


def _run(*command: str | Path, **env: str) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        env={**os.environ, **env},
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with the programs, with and without the sanitizer."""
    # The one that was installed beside Python first: the system's may be too old.
    beside = Path(sys.executable).with_name("cmake")
    cmake = beside if beside.exists() else shutil.which("cmake")
    assert cmake is not None, "install cmake"
    targets = {"plain": ("snac_stress", "link_test", "any_folds")}
    targets["tsan"] = ("snac_stress", "link_test")  # any_folds has one thread
    folders = {}
    for kind, flags in FLAGS.items():
        build = tmp_path_factory.mktemp(f"snac_{kind}")
        options = [
            "-DPURLIN_MODULE=OFF",
            "-DPURLIN_TESTS=ON",
            "-DPURLIN_CUDA=off",
            "-DCMAKE_BUILD_TYPE=None",
        ]
        _run(cmake, "-S", ROOT, "-B", build, *options, f"-DCMAKE_CXX_FLAGS={flags}")
        _run(cmake, "--build", build, "--target", *targets[kind], "--parallel", "2")
        folders[kind] = build
    return folders


@pytest.mark.parametrize(
    ("ranks", "blocks", "threads", "calls"),
    (
        (1, 2, 2, 500),
        (2, 1, 1, 10_000),
        (2, 3, 4, 1000),
        (3, 2, 4, 1000),
        (5, 2, 1, 2000),
        (8, 2, 1, 10_000),
        (16, 1, 1, 2000),
        (16, 2, 1, 500),
    ),
)
def test_values(built: dict[str, Path], ranks: int, blocks: int, threads: int, calls: int) -> None:
    out = _run(built["plain"] / "snac_stress", *map(str, (ranks, blocks, threads, calls)))
    assert f"{calls} calls: 0 wrong values" in out


@pytest.mark.parametrize(
    ("ranks", "blocks", "threads", "calls"),
    (
        (2, 2, 1, 1000),
        (2, 1, 4, 300),
        (3, 2, 2, 300),
        (3, 1, 4, 200),
        (5, 2, 1, 200),
        (8, 1, 1, 200),
        (16, 1, 1, 50),
    ),
)
def test_no_data_race(
    built: dict[str, Path], ranks: int, blocks: int, threads: int, calls: int
) -> None:
    arguments = map(str, (ranks, blocks, threads, calls))
    out = _run(built["tsan"] / "snac_stress", *arguments, TSAN_OPTIONS="halt_on_error=1")
    assert f"{calls} calls: 0 wrong values" in out
    assert "WARNING: ThreadSanitizer" not in out


@pytest.mark.parametrize(("kind", "messages"), (("plain", 5000), ("tsan", 2000)))
def test_link(built: dict[str, Path], kind: str, messages: int) -> None:
    out = _run(built[kind] / "link_test", str(messages), TSAN_OPTIONS="halt_on_error=1")
    assert "all right" in out
    assert "WARNING: ThreadSanitizer" not in out


def test_reductions_that_kernels_share(built: dict[str, Path]) -> None:
    """As the host compiles them, since only a GPU could run the kernels."""
    assert "107 reductions, 10486 cases, 0 differ" in _run(built["plain"] / "any_folds")


def test_wrong_arguments(built: dict[str, Path]) -> None:
    done = subprocess.run(
        [built["plain"] / "snac_stress", "2"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "usage:" in done.stderr
