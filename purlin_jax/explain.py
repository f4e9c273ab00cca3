"""Who runs each collective of a compiled program, and why; the program is not run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, overload

import jax

from purlin_jax import _native, domain
from purlin_jax.backend import Handed, recording
from purlin_jax.joined import is_users


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      by: "purlin"; "jax.lax" where it was written with jax.lax or handed over to it; "XLA" where
        nobody wrote it and sharding needs it. XLA runs the last two.
      op: what runs, "all_reduce" for example. It may differ from what was called: where purlin
        hands over a product, jax.lax gathers.
      reduce: "sum", "max" and so on; empty for copies.
      operands: types of one rank's operands, as compiled: "float32[4,8]". Several where leaves
        travel in one call, or where XLA joins its collectives.
      world: ranks of one group; for a collective_permute, of the longest chain or ring.
      regime, atom, blocks: what purlin runs with (blocks 0: as many as fit); empty and 0 for
        others.
      site: file and line of the user's call; empty where XLA does not know.
      reason: why purlin does not run it; empty where it does.
      path: name that XLA keeps of the JAX operation, scopes included.
    """

    by: str
    op: str
    reduce: str
    operands: tuple[str, ...]
    world: int
    regime: str
    atom: str
    blocks: int
    site: str
    reason: str
    path: str


@dataclass(frozen=True, repr=False)
class Explanation(Sequence[Collective]):
    """The collectives of a compiled program, in the order of its text; prints as a table."""

    rows: tuple[Collective, ...]

    @overload
    def __getitem__(self, at: int) -> Collective: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Collective, ...]: ...
    def __getitem__(self, at: int | slice) -> Collective | tuple[Collective, ...]:
        return self.rows[at]

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return "The compiled program holds no collectives."
        head = ("by", "op", "operands", "ranks", "regime", "atom", "blocks", "call site", "why")
        lines = [head, *map(_cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )

    __repr__ = __str__


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """List every collective of `fn` as compiled for `args`, with who runs it and why.

    `fn` is traced, lowered and compiled afresh, also where that was done before, and not run.
    Nothing is raised where purlin may not hand over to jax.lax (PURLIN_FALLBACK=error or
    backend="purlin"): the row says that it would be an error.

    The body of a loop is in the program once, and so are its collectives. An asynchronous pair
    counts once. Where XLA joins collectives of its own into one, the row has the call site of one.

    Args:
      fn: a function, or one that is jitted.
      *args, **kwargs: its arguments; jax.ShapeDtypeStruct will do, with shardings where they
        matter.

    Returns:
      An Explanation: a sequence of Collective, whose `print` is a table.
    """
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    with recording() as recorder:
        text = jitted.lower(*args, **kwargs).compile().as_text() or ""
    return Explanation(parse(text, recorder.handed))


def parse(hlo: str, handed: Sequence[Handed]) -> tuple[Collective, ...]:
    """The collectives in the text of a compiled program, given what went to jax.lax in tracing."""
    program = _Program(hlo)
    rows = (program.row(match, handed) for match in _INSTRUCTION.finditer(hlo))
    return tuple(row for row in rows if row is not None)


_INSTRUCTION = re.compile(
    r"^ +(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<opcode>[\w\-]+)\("
    r"(?P<operands>.*?)\)(?P<rest>,.*|)$",
    re.MULTILINE,
)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$", re.MULTILINE)
_OPCODES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_WRITTEN = re.compile(
    r"(psum|pmax|pmin|ppermute|pbroadcast|all_gather|all_to_all|ragged_all_to_all|reduce_scatter)"
    r"(?:_invariant|_reduced|_start)?"
)
_SCOPE = re.compile(rf"purlin/({'|'.join(_native.collectives)})(?:\[(.*?)\])?(?=[/)]|$)")
_REDUCTIONS = {
    "add": "sum",
    "multiply": "prod",
    "maximum": "max",
    "minimum": "min",
    "and": "and",
    "or": "or",
    "xor": "xor",
}


class _Program:
    """What the text of a program says beside its collectives."""

    def __init__(self, hlo: str) -> None:
        self.types: dict[str, str] = {}
        self.reductions: dict[str, str] = {}
        starts = [(m.start(), m[1]) for m in _COMPUTATION.finditer(hlo)]
        here = 0
        for m in _INSTRUCTION.finditer(hlo):
            self.types[m["name"]] = _jax_type(m["type"])
            if m["root"]:
                while here + 1 < len(starts) and starts[here + 1][0] < m.start():
                    here += 1
                if starts:
                    self.reductions[starts[here][1]] = _REDUCTIONS.get(m["opcode"], "")
        sizes = re.findall(r"(?:num_partitions|replica_count)=(\d+)", hlo.split("\n", 1)[0])
        self.devices = prod(map(int, sizes))
        self.files = dict(re.findall(r'^(\d+) "(.*)"$', hlo.partition("FunctionNames")[0], re.M))
        self.locations = {
            at: (file, line)
            for at, file, line in re.findall(
                r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", hlo, re.M
            )
        }
        frames = re.findall(
            r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?\}", hlo, re.M
        )
        # Some versions of XLA print the parent's number plus one; a parent comes before its child.
        shift = any(int(parent or 0) >= int(at) for at, _, parent in frames)
        self.frames = {
            int(at): (location, int(parent or 0) - shift) for at, location, parent in frames
        }

    def row(self, m: re.Match[str], handed: Sequence[Handed]) -> Collective | None:
        """The collective in an instruction, if it is one."""
        rest = m["rest"]
        path = _find(r'op_name="(.*?)"', rest)
        operands = [self.types.get(n, "?") for n in re.findall(r"%([\w.\-]+)", m["operands"])]
        opcode = m["opcode"].removesuffix("-start")
        if opcode == "custom-call" and f'custom_call_target="{domain.TARGET}"' in rest:
            config = rest.partition("backend_config=")[2].replace("\\", "")
            text = {k: _find(rf'\b{k} = "(.*?)"', config) for k in ("op", "reduce", "regime")}
            return Collective(
                by="purlin",
                **text,
                operands=tuple(operands[1:]),  # the first is the device's number
                world=int(_find(r"\bworld = (\d+)", config)),
                atom=_find(r'\batom = "(.*?)"', config),
                blocks=int(_find(r"\bblocks = (\d+)", config)),
                site=_find(r'\bsite = "(.*?)(?: \(\w+\))?"', config),
                reason="",
                path=path,
            )
        if opcode not in _OPCODES:
            return None
        by, site, reason = self._origin(path, rest, handed)
        return Collective(
            by=by,
            op=opcode.replace("-", "_"),
            reduce=self.reductions.get(_find(r"to_apply=%?([\w.\-]+)", rest), ""),
            operands=tuple(operands),
            world=_world(rest, self.devices),
            regime="",
            atom="",
            blocks=0,
            site=site,
            reason=reason,
            path=path,
        )

    def _origin(self, path: str, rest: str, handed: Sequence[Handed]) -> tuple[str, str, str]:
        """(by, site, reason) of a collective that XLA runs."""
        ours = _SCOPE.findall(path)
        if ours:
            op, site = ours[-1]
            # A persistent cache of programs may give one that was compiled without explain.
            site = site or self._site(rest)
            here = [h for h in handed if h.site == site]
            # A derivative is another collective than the one that names the scope.
            reasons = dict.fromkeys(h.reason for h in here if h.op == op or not _has(here, op))
            return "jax.lax", site, "; ".join(reasons)
        site = self._site(rest)
        last = path.rpartition("/")[2]
        written = _WRITTEN.fullmatch(last)
        if written is None or 'is_spmd_generated="true"' in rest:
            return "XLA", site, f"added by sharding, for {last}" if last else "added by sharding"
        if "transpose(" in path:
            return "jax.lax", site, f"{written[1]} of jax.lax, in a derivative"
        return "jax.lax", site, f"written as {written[1]} of jax.lax"

    def _site(self, rest: str) -> str:
        """file:line of the innermost frame of the user."""
        frame = int(_find(r"stack_frame_id=(\d+)", rest) or 0)
        while frame in self.frames:
            location, frame = self.frames[frame]
            number, line = self.locations.get(location, ("", ""))
            file = self.files.get(number, "")
            if file and is_users(file):
                return f"{Path(file).name}:{line}"
        file, line = _find(r'source_file="(.*?)"', rest), _find(r"source_line=(\d+)", rest)
        return f"{Path(file).name}:{line}" if file and is_users(file) else ""


def _has(handed: Sequence[Handed], op: str) -> bool:
    return any(h.op == op for h in handed)


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""


def _jax_type(text: str) -> str:
    """f32[4,8]{1,0} as JAX writes it: float32[4,8]."""
    found = re.match(r"([a-z]\w*)(\[[\d,<=]*\])", text)
    if found is None:
        return "?"
    name, shape = found.groups()
    kind = re.fullmatch(r"(pred|bf|f|s|u|c)(\d*)(e\w+)?", name)
    if kind is None:
        return name + shape
    words = {"pred": "bool", "bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}
    return words[kind[1]] + kind[2] + (f"_{kind[3]}" if kind[3] else "") + shape


def _world(rest: str, devices: int) -> int:
    """Ranks of one group of a collective of XLA."""
    pairs = _find(r"source_target_pairs=\{(.*?)\}\}", rest)
    if pairs:
        return _longest(re.findall(r"(\d+),(\d+)", pairs))
    mesh = _find(r"replica_groups=mesh\[(.*?)\]", rest)
    if mesh:
        axes = _find(r"replica_groups=mesh\[.*?\].*?\{(.*?)\}", rest)
        sizes = dict(re.findall(r"'?([^',]+?)'?=(\d+)", mesh))
        parts = re.findall(r"'?([^',:]+)'?(?::\(\d+\)(\d+))?(?:,\s*|$)", axes)
        return prod(int(part or sizes.get(name.strip("' "), 1)) for name, part in parts)
    shape = _find(r"replica_groups=\[([\d,]+)\]<=", rest)
    if shape:
        return int(shape.split(",")[-1])
    group = _find(r"replica_groups=\{\{([\d,]+)\}", rest)
    return len(group.split(",")) if group else devices


def _longest(pairs: Sequence[tuple[str, str]]) -> int:
    """Members of the largest set of devices that the pairs connect."""
    group = {device: {device} for pair in pairs for device in pair}
    for source, target in pairs:
        joined = group[source] | group[target]
        for device in joined:
            group[device] = joined
    return max(map(len, group.values()))


def _cells(row: Collective) -> tuple[str, ...]:
    """A row as texts, in the columns of the table."""
    runs = [(kind, len(list(same))) for kind, same in groupby(row.operands)]
    operands = ", ".join(kind if n == 1 else f"{n} x {kind}" for kind, n in runs)
    blocks = "" if row.by != "purlin" else str(row.blocks or "auto")
    cells = (
        row.by,
        f"{row.op} {row.reduce}".rstrip(),
        operands,
        str(row.world),
        row.regime,
        row.atom,
        blocks,
        row.site,
    )
    return (*(cell or "-" for cell in cells), row.reason)
