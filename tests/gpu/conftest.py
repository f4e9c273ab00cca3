"""GPU tests run where there are GPUs; elsewhere they say so and are skipped."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

HERE = Path(__file__).parent


def _gpus() -> int:
    try:
        return len(jax.devices("gpu"))
    except RuntimeError:  # this jax has no GPU backend, or the machine no GPU
        return 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    if not mine:
        return
    count = _gpus()
    for item in mine:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1
        if count < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} NVIDIA GPUs, found {count}"))
