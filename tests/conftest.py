"""Eight virtual CPU devices, strict mode and no policy but --regime's, before any backend starts.

With `--regime NAME[:blocks[:staging_bytes]]` the whole run is traced under that policy, and fails
if native code ran any other regime, or none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

# A silent fall to jax.lax would pass every parity test, so in here it is an error.
os.environ["PURLIN_FALLBACK"] = "error"
os.environ["PURLIN_SINGLE"] = "call"  # collectives of one rank are tested like others
# What the caller's shell prefers must not choose what is tested.
os.environ.pop("PURLIN_BACKEND", None)
os.environ.pop("PURLIN_POLICY", None)
os.environ["PURLIN_POLICIES"] = os.devnull

import jax
import pytest

import purlin_jax as purlin
from purlin_jax.policy import table

jax.config.update("jax_num_cpu_devices", 8)
# Compiling takes most of the time. What runs in processes of its own is compiled as users do it.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def optimised() -> Iterator[None]:
    """For tests that compute so long that it is worth compiling for."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


_FORCED = pytest.StashKey[purlin.Policy]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regime",
        metavar="NAME[:BLOCKS[:STAGING_BYTES]]",
        help="force this regime in all tests, and fail if another one runs",
    )


def pytest_configure(config: pytest.Config) -> None:
    given = config.getoption("--regime")
    if not given:
        return
    name, *knobs = given.split(":")
    forced = config.stash[_FORCED] = purlin.Policy(name, *map(int, knobs))
    context = ExitStack()
    context.enter_context(
        purlin.policy(name, blocks=forced.blocks, staging_bytes=forced.staging_bytes)
    )
    config.add_cleanup(context.close)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under --regime, leave out twins and tests with their own regime; skip what is beyond it."""
    if _FORCED not in config.stash:
        return
    regime = config.stash[_FORCED].regime
    # How results are typed is settled before a regime is, so one of both ways will do.
    left_out = [
        item
        for item in items
        if item.get_closest_marker("own_regime")
        or (hasattr(item, "callspec") and item.callspec.params.get("check_vma") is False)
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    for item in items:
        for marker in item.iter_markers("beyond"):
            if marker.args[0] == regime:
                item.add_marker(pytest.mark.skip(reason=f"{regime}: {marker.kwargs['why']}"))


def _fault(config: pytest.Config) -> str | None:
    """Under --regime, what else native code has run in this process, if not that regime alone."""
    if _FORCED not in config.stash:
        return None
    ran = {regime for _, regime in purlin.native_regimes()}
    others = sorted(ran - {config.stash[_FORCED].regime})
    return f"ran {', '.join(others)} too" if others else None if ran else "ran no native call"


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _fault(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if _FORCED not in config.stash:
        return
    for (op, regime), calls in sorted(purlin.native_regimes().items()):
        terminalreporter.write_line(f"{op} in {regime}: {calls} native calls")
    if fault := _fault(config):
        terminalreporter.write_line(f"--regime {config.getoption('--regime')}: {fault}", red=True)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user's own tables; none is remembered before or after."""
    monkeypatch.setenv("PURLIN_POLICIES", str(tmp_path))
    table.cache_clear()
    yield tmp_path
    table.cache_clear()
