"""Starts a program of tests/process_programs.py in several processes of one job."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Job:
    """`count` processes of `devices` CPU devices each, in strict mode; a context that ends them.

    `env` holds variables of the environment of all, and `own` of single processes. With `gpus`,
    each process has one of so many GPUs instead, which processes share.
    """

    def __init__(
        self,
        program: str,
        *args: Any,
        count: int = 2,
        devices: int = 2,
        env: Mapping[str, str] | None = None,
        own: Mapping[int, Mapping[str, str]] | None = None,
        gpus: int = 0,
    ) -> None:
        self._program, self._args, self._count, self._devices = program, args, count, devices
        self._own = {i: dict((own or {}).get(i, {})) for i in range(count)}
        for i in range(count if gpus else 0):
            share = 0.9 / -(-count // gpus)
            self._own[i] = {
                "JAX_PLATFORMS": "cuda,cpu",
                "CUDA_VISIBLE_DEVICES": str(i % gpus),
                "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{min(share, 0.2):.3f}",
                **self._own[i],
            }
        self._env = {**os.environ, "PURLIN_FALLBACK": "error", **(env or {})}
        self._env["PURLIN_POLICIES"] = os.devnull  # no tables of the user's own
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._files: dict[int, Any] = {}

    def __enter__(self) -> Job:
        port = _free_port()
        for i in range(self._count):
            self._files[i] = tempfile.TemporaryFile()
            where = map(str, (i, self._count, self._devices, port, *self._args))
            self.processes[i] = subprocess.Popen(
                [sys.executable, "-m", "tests.process_programs", self._program, *where],
                cwd=ROOT,
                env={**self._env, **self._own[i]},
                stdout=self._files[i],
                stderr=subprocess.STDOUT,
            )
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        for file in self._files.values():
            file.close()

    def output(self, i: int) -> str:
        descriptor = self._files[i].fileno()
        size = os.fstat(descriptor).st_size
        return os.pread(descriptor, size, 0).decode(errors="replace")

    def outputs(self) -> str:
        """What all have printed, for messages."""
        return "\n".join(f"--- process {i}\n{self.output(i)}" for i in self.processes)

    def _stacks(self) -> str:
        """The outputs, and what all threads do that still run."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(1)
        return self.outputs()

    def wait_for(self, i: int, text: str, seconds: float = 60) -> str:
        """The rest of the line that process `i` prints after `text`."""
        end = time.monotonic() + seconds
        while True:
            over = self.processes[i].poll() is not None or time.monotonic() > end
            _, found, rest = self.output(i).partition(text)
            if found and "\n" in rest:
                return rest.partition("\n")[0].strip()
            assert not over, f"process {i} did not print {text!r}\n{self.outputs()}"
            time.sleep(0.02)

    def finish(self, seconds: float = 90, ends_well: Sequence[int] | None = None) -> None:
        """Wait for all processes; those in `ends_well` (None: all) must return 0."""
        end = time.monotonic() + seconds
        for i, process in self.processes.items():
            try:
                code = process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"process {i} hangs\n{self._stacks()}") from None
            if ends_well is None or i in ends_well:
                assert code == 0, f"process {i} returned {code}\n{self.outputs()}"


def run(program: str, *args: Any, seconds: float = 90, **kwargs: Any) -> list[str]:
    """The outputs of a job whose processes all end well."""
    with Job(program, *args, **kwargs) as job:
        job.finish(seconds)
        return [job.output(i) for i in job.processes]


def run_with_a_cache(start: Callable[..., list[str]], folder: Path) -> None:
    """start(program, own=) of two processes, one of which keeps what it compiles; the second time
    the program comes out of its cache."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    for hits in (0, 1):
        outputs = start("once", "cached", own={0: cache})
        found = [f"HITS {n}" in out for n, out in zip((hits, 0), outputs, strict=True)]
        assert found == [True, True], outputs


_PAGES = 16 << 20 >> 12  # of memory that some thousand calls may still add


def leaves_nothing(output: str) -> None:
    """A process that printed what it used before and after many calls uses no more."""
    before, after = json.loads(output.partition("USED")[2].splitlines()[0])
    files, threads, pages = (b - a for a, b in zip(before, after, strict=True))
    assert files <= 0 and threads <= 8 and pages < _PAGES, (before, after)
