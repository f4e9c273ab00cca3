"""Groups that leave their hosts: purlin inside each, jax.lax across, as one call over all ranks."""

from __future__ import annotations

import numpy as np
import pytest

from purlin_jax import hosts
from tests.harness import mesh
from tests.launcher import run


@pytest.mark.parametrize(("count", "devices", "machines"), ((2, 2, 2), (3, 2, 3), (4, 1, 2)))
def test_equal_to_one_call(count: int, devices: int, machines: int) -> None:
    """Processes stand for hosts; in the last case two of them share each."""
    own = {i: {"PURLIN_HOST": f"host {i * machines // count}"} for i in range(count)}
    # jax.lax is part of it, so strict mode must not mind.
    run("hosts", str(machines), count=count, devices=devices, own=own)


@pytest.mark.parametrize(
    ("placed", "axes", "expected"),
    (
        ([[0, 0], [1, 1]], ("a", "b"), (("a",), ("b",))),
        ([[0, 1], [0, 1]], ("b", "a"), (("b",), ("a",))),
        ([[0, 0], [0, 0]], ("a", "b"), ((), ("a", "b"))),
        ([[0, 1], [2, 3]], ("a", "b"), (("a", "b"), ())),
        ([[0, 0, 1, 1]], ("a", "b"), None),  # an axis that is on a host in part
    ),
)
def test_axes(placed: list[list[int]], axes: tuple[str, ...], expected: object) -> None:
    where = np.array(placed)
    assert hosts.split(mesh(where.size, ("a", "b"), where.shape), axes, where) == expected


def test_groups_that_keep_to_their_hosts() -> None:
    placed = np.array([[0, 0], [1, 1]])
    assert hosts.keeps_to_them(placed, np.array([[0, 1], [2, 3]]))
    assert not hosts.keeps_to_them(placed, np.array([[0, 2], [1, 3]]))
