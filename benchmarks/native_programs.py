"""Native programs that answer each line of a configuration with one row of JSON."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class NoFiguresError(RuntimeError):
    """A program gave no figures; the text says why."""


def visible(devices: int | None) -> dict[str, str]:
    """An environment in which native programs see the first `devices` GPUs; all for None."""
    env = dict(os.environ)
    if devices is not None:
        seen = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = [name for name in seen if name] or [str(i) for i in range(devices)]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(names[:devices])
    return env


def ask_about(program: Path, env: Mapping[str, str]) -> Row:
    """What `program --about` says. Ends the process where it is not there or finds no GPU."""
    if not program.is_file():
        raise SystemExit(
            f"{program} is not there. Build it with: cmake -S . -B {program.parent} -G Ninja "
            f"-DPURLIN_MODULE=OFF -DPURLIN_BENCH=ON -DCMAKE_CUDA_ARCHITECTURES=native && ninja -C "
            f"{program.parent} (nccl_time needs NCCL, which jax[cuda13] brings)"
        )
    done = subprocess.run([program, "--about"], env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{program}: {done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])


class Program:
    """One of them, started when it is first asked, and again after it has failed."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], timeout: float) -> None:
        self.command = list(command)
        self._env = env
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, line: str) -> Row:
        """The row for a configuration. Raises NoFiguresError, after which the program has ended."""
        if self._process is None:
            self._process = subprocess.Popen(
                self.command,
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # what was read and not looked at would hide from the selector
                start_new_session=True,  # ranks may be processes of their own
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(f"{line}\n".encode())
            # Whatever a library prints beside the rows is no answer.
            while True:
                with selectors.DefaultSelector() as selector:
                    selector.register(process.stdout, selectors.EVENT_READ)
                    if not selector.select(self._timeout):
                        raise NoFiguresError(f"no answer within {self._timeout:g} seconds")
                answer = process.stdout.readline()
                if not answer:
                    raise NoFiguresError(f"ended with status {process.wait(10)}")
                if answer.startswith(b"{"):
                    return json.loads(answer)
        except (OSError, ValueError, subprocess.TimeoutExpired, NoFiguresError) as error:
            self._kill()
            raise NoFiguresError(str(error)) from error

    def close(self) -> None:
        """Let the program end by itself, or end it."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(30)
        self._kill()

    def _kill(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
