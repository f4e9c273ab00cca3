"""Eight ranks on few GPUs: processes that share GPUs run every collective, regime and Atom."""

from __future__ import annotations

import pytest

from tests.gpu.test_processes import REGIMES, on_gpus

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("way", REGIMES)
def test_fixed(way: str) -> None:
    on_gpus("fixed", way, count=8, seconds=300)


def test_counted() -> None:
    on_gpus("counted", count=8, seconds=300)


def test_transforms() -> None:
    on_gpus("transforms", count=8, seconds=300, PURLIN_ARENA_MB="512")
