"""The example draws digits on eight devices, and its own checks can fail."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import jax

from purlin_jax.examples import dit, train


def _sample(out: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "purlin_jax.examples.diffusion", "sample", "--out", out]
    return subprocess.run(
        [*map(str, command), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_sample(tmp_path: Path) -> None:
    out = tmp_path / "digits.png"
    done = _sample(out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert out.read_bytes().startswith(b"\x89PNG")
    calls = re.search(r"native purlin calls +(\d+)", done.stdout)
    # Two exchanges in each of 4 blocks, 30 steps and 8 devices; drawn twice to be timed.
    assert calls is not None and int(calls.group(1)) == 2 * 4 * 30 * 8 * 2


def test_random_weights_fail(tmp_path: Path) -> None:
    weights = tmp_path / "random.npz"
    train.save(weights, dit.init(jax.random.key(0), dit.Config()))
    out = tmp_path / "noise.png"
    done = _sample(out, "--weights", weights, "--steps", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED: the classifier does not recognise the digits" in done.stderr
    assert "something else" not in done.stderr
