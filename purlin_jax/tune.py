"""Times ways to run collectives on the devices that are there, for a policy table of the best."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import purlin_jax as purlin
from purlin_jax import _native, bench, domain, table_edit
from purlin_jax.measure import Sampler, interleaved, pipelined, require_collectives
from purlin_jax.policy import (
    Choice,
    Policy,
    Traffic,
    choose,
    fits,
    own_folder,
    row_of,
    table,
    table_file,
)
from purlin_jax.table_edit import Contest, Samples

SETTINGS: dict[str, Any] = json.loads(
    resources.files("purlin_jax").joinpath("candidates.json").read_text()
)
_ITEM_BYTES = 4  # everything is timed in float32
_CHECKED_BYTES = 1 << 20  # values are compared on the host, so not in arrays that fill a GPU


def contests(
    settings: dict[str, Any],
    arch: str,
    world: int,
    capacity: dict[str, int],
    atom_of: Callable[[str], str],
) -> list[Contest]:
    """What is to be timed, what matters most first.

    Args:
      settings: of the platform, from candidates.json.
      arch: names the table whose choices are to be beaten.
      world: number of ranks.
      capacity: bytes that the windows hold, by regime.
      atom_of: maps an Atom that a table names to the one that the binary has for it.
    """
    found = table(arch)
    made = []
    for nbytes in settings["sizes"]:
        traffic = Traffic(nbytes, _ITEM_BYTES, capacity=capacity)
        for op, *others in SETTINGS["classes"]:
            row = row_of(found, op, world)
            ops = (op, *(o for o in others if row_of(found, o, world) is row))
            candidates = [
                _policy(c, found["atom"])
                for c in settings["candidates"]
                if c["from_bytes"] <= nbytes <= (c["to_bytes"] or nbytes)
                and world >= c.get("least_world", 2)
                and c["regime"] in found["regimes"]
                and fits(c["regime"], op, arch, traffic)
            ]
            choices = [choose(p, op, arch, world, traffic) for p in (Policy(), *candidates)]
            known = dict.fromkeys(replace(c, atom=atom_of(c.atom)) for c in choices)
            if len(known) > 1:
                made.append(Contest(ops, nbytes, tuple(known)))
    return made


def _policy(candidate: dict[str, Any], newest: str) -> Policy:
    knobs = {k: candidate[k] for k in ("regime", "blocks", "threads", "depth") if k in candidate}
    atom = candidate.get("atom", "newest")
    return Policy(**knobs, atom=newest if atom == "newest" else atom)


@dataclass
class Track:
    """Where contests are run."""

    mesh: Mesh
    settings: dict[str, Any]
    checked: set[tuple[str, Choice]] = field(default_factory=set)

    def race(self, contest: Contest) -> Samples:
        """Time all choices, in turns; RuntimeError if one of them gives wrong values."""
        for op in contest.ops:
            new = [c for c in contest.choices if (op, c) not in self.checked]
            if new:
                check_values(op, new, min(contest.nbytes, _CHECKED_BYTES), self.mesh)
            self.checked.update((op, c) for c in new)
        op, world = contest.ops[0], self.mesh.size
        start = _filled(op, contest.nbytes, self.mesh)
        scale = 1 / world if _native.collectives[op]["consume"] == "reduce" else 1.0
        sharding = NamedSharding(self.mesh, PartitionSpec("i"))
        w = jax.device_put(np.full(world, scale, np.float32), sharding)
        samplers = [self._sampler(op, contest.nbytes, c, start, w) for c in contest.choices]
        taken = interleaved(samplers, self.settings["samples"])
        return dict(zip(contest.choices, taken, strict=True))

    def _sampler(self, op: str, nbytes: int, choice: Choice, start: Any, w: Any) -> Sampler:
        # Not bench.prepare, which draws its values on the host: seconds for the largest arrays.
        shape = next(p for p in self.settings["programs"] if nbytes <= (p["up_to_bytes"] or nbytes))
        with purlin.policy(**asdict(forced(choice))), purlin.backend("purlin"):
            program = bench.chain(bench.OPS[op]["purlin"], shape["calls"], self.mesh)
            compiled = program.lower(start, w).compile()
        require_collectives(compiled.as_text(), op, "purlin", shape["calls"])
        return pipelined(compiled, start, w, in_flight=shape["in_flight"], steps=shape["calls"])


def forced(choice: Choice) -> Policy:
    """The policy that takes exactly this choice."""
    knobs = asdict(choice)
    return Policy(**{f.name: knobs[f.name] for f in fields(Policy)})


def _filled(op: str, nbytes: int, mesh: Mesh) -> jax.Array:
    """Small integers, whose sums are exact, made where they are needed."""
    whole = op in ("all_reduce", "all_gather")  # what goes to a peer is the whole operand
    items = nbytes // _ITEM_BYTES * (1 if whole else mesh.size)

    def fill() -> jax.Array:
        return (jnp.arange(items) % 13 + jax.lax.axis_index("i")).astype(jnp.float32)

    return jax.jit(jax.shard_map(fill, mesh=mesh, in_specs=(), out_specs=PartitionSpec("i")))()


_RUN: dict[str, Callable[[jax.Array, Policy], Any]] = {
    "all_reduce": lambda v, p: purlin.all_reduce(v, "i", policy=p),
    "reduce_scatter": lambda v, p: purlin.reduce_scatter(v, "i", tiled=True, policy=p),
    "all_to_all": lambda v, p: purlin.all_to_all(v, "i", 0, 0, tiled=True, policy=p),
    "all_gather": lambda v, p: purlin.all_gather(v, "i", tiled=True, policy=p),
}
_EXPECTED: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # of the operands, one a row
    "all_reduce": lambda x: np.tile(x.sum(0), len(x)),
    "reduce_scatter": lambda x: x.sum(0),
    "all_to_all": lambda x: x.reshape(len(x), len(x), -1).swapaxes(0, 1),
    "all_gather": lambda x: np.tile(x.ravel(), len(x)),
}


def check_values(op: str, choices: Sequence[Choice], nbytes: int, mesh: Mesh) -> None:
    """Raise RuntimeError if one of `choices` gives other values than numpy does."""
    x, spec = _filled(op, nbytes, mesh), PartitionSpec("i")

    def each(v: jax.Array) -> list[Any]:
        return [_RUN[op](v, forced(choice)) for choice in choices]

    program = jax.shard_map(each, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with purlin.backend("purlin"):
        results = jax.jit(program)(x)
    expected = _EXPECTED[op](np.asarray(x).reshape(mesh.size, -1)).ravel()
    for choice, y in zip(choices, results, strict=True):
        if not np.array_equal(np.asarray(y), expected):
            raise RuntimeError(
                f"tune: {op} of {nbytes} bytes gave wrong values with {choice}, and no table was "
                "written; please report this with what `python -m purlin_jax selftest` prints"
            )


def measure(
    planned: Sequence[Contest],
    race: Callable[[Contest], Samples],
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[dict[Contest, Samples], dict[Contest, str]]:
    """Samples of the contests that can end before `deadline`, and why others were left out.

    How long one takes is guessed from those before it: at most what a larger one took. So it may be
    late by one contest.
    """
    measured: dict[Contest, Samples] = {}
    left: dict[Contest, str] = {}
    took: dict[int, float] = {}  # seconds a choice, by size
    for contest in planned:
        began = clock()
        larger = [seconds for nbytes, seconds in took.items() if nbytes >= contest.nbytes]
        guess = min(larger, default=max(took.values(), default=0.0))
        if began + guess * len(contest.choices) >= deadline:
            left[contest] = "no time was left"
            continue
        try:
            measured[contest] = race(contest)
        except jax.errors.JaxRuntimeError as error:  # out of memory, for example
            left[contest] = str(error).partition("\n")[0]
        seconds = (clock() - began) / len(contest.choices)
        took[contest.nbytes] = max(took.get(contest.nbytes, 0.0), seconds)
    return measured, left


def run(mesh: Mesh, minutes: float, out: Path | None) -> None:
    """Measure for some minutes on the devices of `mesh`, and write the table that comes of it.

    Args:
      mesh: all devices along its one axis, "i".
      minutes: after which no further contest begins.
      out: the file to write; None for the one in own_folder(), which is read from then on.
    """
    deadline = time.monotonic() + 60 * minutes
    device = mesh.devices.flat[0]
    platform = "cuda" if device.platform == "gpu" else "cpu"
    reason = domain.refusal(platform, mesh, "sum", "float32", False)
    if mesh.size < 2:
        reason = "one device has no peer"
    if reason is not None:
        raise SystemExit(f"tune: nothing can be measured here: {reason}")
    arch, settings = domain.arch(platform, mesh), SETTINGS[platform]
    found, used = table(arch), own_folder() / f"{arch}.json"
    path = out or used
    table_edit.prepare_to_write(path)
    track = Track(mesh, settings)

    def race(contest: Contest) -> Samples:
        samples = track.race(contest)
        print(table_edit.summary(contest, samples, SETTINGS["least_win"]), flush=True)
        return samples

    planned = contests(
        settings,
        arch,
        mesh.size,
        domain.capacity(platform, mesh.size),
        lambda atom: domain.atom(platform, atom, False),
    )
    measured, left = measure(planned, race, deadline)
    for contest, why in left.items():
        print(f"left as it was: {contest}: {why}")
    source = f"tuned on {mesh.size}x {device.device_kind}, {datetime.date.today().isoformat()}"
    win, sizes = SETTINGS["least_win"], settings["sizes"]
    rows = table_edit.tuned_rows(found, mesh.size, measured, sizes, win, source)
    if not rows and out is None:
        print(f"nothing beat {table_file(arch)}, so nothing was written")
        return
    table_edit.write(table_edit.with_rows(found, arch, rows), path)
    print(f"wrote {path}, with {len(rows)} new rows for {mesh.size} ranks")
    if path == used:
        print("Programs that start from now on read it; remove it to have the former table back.")
    else:
        print(f"Programs read it when it lies at {used}.")
