"""The build backend: scikit-build-core's, plus the CUDA compiler of PyPI where it is asked for."""

from __future__ import annotations

import os
from typing import Any

from scikit_build_core import build as _core
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

# The first CUDA 13, since any driver that runs a CUDA 13 compiles its PTX. nvidia-cuda-nvcc leaves
# the versions of the other parts open, and parts of two releases do not fit together.
CUDA_13 = [
    "nvidia-cuda-cccl==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-nvvm==13.0.*",
]


def compiler_packages(purlin_cuda: str | None) -> list[str]:
    """What a value of PURLIN_CUDA takes from PyPI; a bad one ends the build with advice."""
    if purlin_cuda == "13":
        return CUDA_13
    if purlin_cuda in (None, "auto", "on", "off"):
        return []
    if purlin_cuda == "12":
        raise SystemExit(
            "PURLIN_CUDA=12 was given, and PyPI has no nvcc of CUDA 12. If nvidia-smi shows driver "
            "580 or newer, use PURLIN_CUDA=13. For an older driver install the CUDA toolkit (12.3 "
            "or newer), put its nvcc on PATH and use PURLIN_CUDA=on."
        )
    raise SystemExit(
        f"PURLIN_CUDA={purlin_cuda} was given, and it can be auto (build the CUDA side if nvcc is "
        "found), on (fail if it is not), off, or 13 (take nvcc from PyPI). Set it to one of these, "
        "or unset it for auto."
    )


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    packages = compiler_packages(os.environ.get("PURLIN_CUDA"))
    return _core.get_requires_for_build_wheel(config_settings) + packages


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    packages = compiler_packages(os.environ.get("PURLIN_CUDA"))
    return _core.get_requires_for_build_editable(config_settings) + packages
