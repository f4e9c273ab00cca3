"""A rank that does not arrive is named in a report and an error, and others go on."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purlin_jax as purlin
from purlin_jax import domain
from tests.harness import mesh, sharded


@pytest.fixture(autouse=True)
def _limits() -> Iterator[None]:
    slow, budget = domain.budget()
    yield
    purlin.set_timeout(budget, slow=slow)


def _program(seconds: float) -> Any:
    """all_reduce over 3 devices; the host thread of rank 1 sleeps before it."""

    def sleep(rank: Any, value: Any) -> Any:
        if int(rank) == 1:
            time.sleep(seconds)
        return np.asarray(value)

    def body(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        late = jax.pure_callback(sleep, shape, jax.lax.axis_index("x"), x)
        return purlin.all_reduce(late, "x")

    return sharded(body, mesh(3), check_vma=False)


@pytest.mark.parametrize("regime", ("auto", "packet"))
def test_late_rank_ends_the_wait(regime: str, capfd: pytest.CaptureFixture[str]) -> None:
    f = _program(4.0)
    purlin.set_timeout(1.0, slow=0.4)
    start = time.monotonic()
    with (
        purlin.policy(regime),
        pytest.raises(jax.errors.JaxRuntimeError, match=r"gave up: all_reduce at test_waits.py"),
    ):
        jax.block_until_ready(f(jnp.ones(6)))
    assert time.monotonic() - start < 10
    assert "waits for rank 1 since" in purlin.last_report()
    printed = capfd.readouterr().err
    assert "purlin: slow: all_reduce" in printed and "purlin: gave up: all_reduce" in printed
    # What follows is not harmed.
    purlin.set_timeout(60.0)
    assert domain.budget() == (0.4, 60.0)
    assert np.all(
        np.asarray(sharded(lambda x: purlin.all_reduce(x, "x"), mesh(3))(jnp.ones(6))) == 3
    )


@pytest.mark.parametrize("slow", (0.3, math.inf))
def test_late_rank_within_the_budget_is_waited_for(
    slow: float, capfd: pytest.CaptureFixture[str]
) -> None:
    purlin.set_timeout(60.0, slow=slow)
    assert np.all(np.asarray(_program(1.0)(jnp.ones(6))) == 3)
    assert ("slow: all_reduce" in capfd.readouterr().err) == math.isfinite(slow)
