"""What PURLIN_CUDA makes the build take from PyPI, and what it says of values it does not know."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
KINDS = ("wheel", "editable")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The backend of pyproject.toml over an empty scikit-build-core, which only builds have."""
    core = ModuleType("scikit_build_core.build")
    for kind in (*KINDS, "sdist"):
        setattr(core, f"build_{kind}", None)
        setattr(core, f"prepare_metadata_for_build_{kind}", None)
        setattr(core, f"get_requires_for_build_{kind}", lambda config_settings=None: ["ninja"])
    package = ModuleType("scikit_build_core")
    package.build = core  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, core.__name__, core)
    system = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    for path in system["backend-path"]:
        monkeypatch.syspath_prepend(str(ROOT / path))
    monkeypatch.delitem(sys.modules, system["build-backend"], raising=False)
    return importlib.import_module(system["build-backend"])


def requires(backend: ModuleType, kind: str) -> list[str]:
    return getattr(backend, f"get_requires_for_build_{kind}")({})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", (None, "auto", "on", "off"))
def test_an_ordinary_build_takes_nothing(
    backend: ModuleType, kind: str, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PURLIN_CUDA", raising=False)
    if value is not None:
        monkeypatch.setenv("PURLIN_CUDA", value)
    assert requires(backend, kind) == ["ninja"]


@pytest.mark.parametrize("kind", KINDS)
def test_13_takes_the_parts_of_one_release(
    backend: ModuleType, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PURLIN_CUDA", "13")
    ninja, *packages = requires(backend, kind)
    assert ninja == "ninja"
    assert {"nvidia-cuda-nvcc", "nvidia-nvvm"} < {p.partition("==")[0] for p in packages}
    assert {p.partition("==")[2] for p in packages} == {"13.0.*"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("value", "advice"), (("12", "use PURLIN_CUDA=13.*PURLIN_CUDA=on"), ("14", "unset it for auto"))
)
def test_others_end_with_advice(
    backend: ModuleType, kind: str, value: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PURLIN_CUDA", value)
    with pytest.raises(SystemExit, match=f"PURLIN_CUDA={value} was given.*{advice}"):
        requires(backend, kind)


def test_cmake_knows_the_same_values() -> None:
    """Without build isolation nobody asks the backend what it requires."""
    script = ROOT / "cmake" / "pypi_cuda.cmake"
    beside = str(Path(sys.executable).parent)
    cmake = shutil.which("cmake", path=os.pathsep.join((beside, os.environ["PATH"])))
    assert cmake is not None, "install cmake"
    for value, passes in (("auto", True), ("on", True), ("off", True), ("14", False)):
        command = [cmake, f"-DPURLIN_CUDA={value}", "-P", str(script)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (run.returncode == 0) == passes, run.stderr
        assert passes or "PURLIN_CUDA=14 was given" in run.stderr
