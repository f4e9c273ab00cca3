"""Windows lie in the arena: call sites share them, and where it is full jax.lax takes over."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

# A world of one device stands for each partition: windows are as large for any number of ranks.
FULL = """
import jax, jax.numpy as jnp, numpy as np, purlin_jax as purlin
from purlin_jax import domain
from tests.gpu.harness import gpus, sharded

mesh = gpus()
x = jnp.arange(mesh.size * 64.0)
programs = [sharded(lambda v, k=k: purlin.all_reduce(v + k, "x"), mesh) for k in range(20)]
first = [np.asarray(f(x)) for f in programs[:1]]
used, _ = domain.cuda.arena()
for f in programs:
    f(x)
assert domain.cuda.arena()[0] == used, "call sites of one partition took windows of their own"
partition = [0]
while True:
    if why := domain.cuda.reserve(partition, 1):
        assert "PURLIN_ARENA_MB" in why
        break
    partition = partition + [0]
with purlin.policy("packet"):
    np.testing.assert_array_equal(np.asarray(programs[0](x)), first[0])  # its window is still there
used, size = domain.cuda.arena()
assert used <= size
"""


def test_a_full_arena_says_so_and_known_windows_stay() -> None:
    env = {**os.environ, "PURLIN_ARENA_MB": "64", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", FULL], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


SMALL = """
import jax.numpy as jnp, numpy as np, purlin_jax as purlin
from tests.gpu.harness import gpus, sharded

mesh = gpus()
x = jnp.arange(mesh.size * 64.0)
y = sharded(lambda v: purlin.all_reduce(v, "x"), mesh)(x)
np.testing.assert_array_equal(np.asarray(y)[:64], np.asarray(x).reshape(mesh.size, 64).sum(0))
assert purlin.native_calls() == {}, purlin.native_calls()
"""


def test_jax_lax_takes_over_where_no_window_fits() -> None:
    env = {**os.environ, "PURLIN_ARENA_MB": "16", "PURLIN_FALLBACK": ""}
    done = subprocess.run(
        [sys.executable, "-c", SMALL], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
