"""Types of the native module; ffi/xla/module.cc is its source."""

from collections.abc import Sequence
from typing import Any

ffi_api: tuple[int, int]
compiler: str
max_ranks: int
max_operands: int
collectives: dict[str, dict[str, str]]
regimes: dict[str, tuple[list[str], list[str]]]
without_lending: dict[str, str]
reduces: tuple[tuple[str, str], ...]

def targets() -> dict[str, Any]: ...
def set_limits(slow_s: float, budget_s: float) -> None: ...
def last_report() -> str: ...
def calls() -> dict[tuple[str, str], int]: ...
def result_shape(
    op: str, shape: Sequence[int], world: int, split: int, concat: int
) -> list[int]: ...
def plan(
    op: str, shape: Sequence[int], item_bytes: int, world: int, split: int, concat: int
) -> dict[str, Any]: ...
def begin_call(ordinal: int, site: str, tag: int, cached: bool) -> None: ...
def join(
    process: int, count: int, name: str, token: str, arena_bytes: int, seconds: float
) -> None: ...
