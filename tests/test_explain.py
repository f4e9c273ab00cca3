"""What purlin.explain says of compiled programs, and that it neither runs nor raises anything."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

import purlin_jax as purlin
from purlin_jax.backend import Handed
from purlin_jax.explain import parse
from tests.harness import LATE_REASON, Fn, P, mesh, refuse_late, reordered_2x4, sharded

X = jax.ShapeDtypeStruct((16, 8), jnp.float32)
NONE = "The compiled program holds no collectives."


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PURLIN_FALLBACK")


def one(rows: Iterable[purlin.Collective]) -> purlin.Collective:
    (row,) = rows
    return row


def line(fn: Callable[..., Any], marker: str) -> str:
    """file:line of the first line in a function's source that holds the marker."""
    lines, first = inspect.getsourcelines(fn)
    at = next(i for i, text in enumerate(lines) if marker in text)
    return f"test_explain.py:{first + at}"


def psum(v: jax.Array, **kwargs: Any) -> jax.Array:
    return v * purlin.psum(v, "x", **kwargs)


def test_a_native_call() -> None:
    row = one(purlin.explain(sharded(psum, mesh(4)), X))
    assert (row.by, row.op, row.reduce) == ("purlin", "all_reduce", "sum")
    assert row.operands == ("float32[4,8]",)
    assert (row.world, row.regime, row.atom, row.blocks) == (4, "meet", "cpu", 0)
    assert row.site == line(psum, "purlin.psum")
    assert row.reason == ""
    assert "purlin/all_reduce" in row.path


def test_the_table() -> None:
    head, row = str(purlin.explain(sharded(psum, mesh(4)), X)).split("\n")
    assert head.split("  ")[0] == "by"
    cells = re.split(r"\s{2,}", row)
    site = line(psum, "purlin.psum")
    assert cells == ["purlin", "all_reduce sum", "float32[4,8]", "4", "meet", "cpu", "auto", site]
    assert head.index("call site") == row.index(site)


@pytest.mark.parametrize(
    "regime", ("meet", "packet", "staged", "zero_staging", "composed", "zero_staging_composed")
)
def test_regimes_of_a_context(regime: str) -> None:
    with purlin.policy(regime, blocks=2):
        row = one(purlin.explain(sharded(psum, mesh(4)), X))
    assert (row.regime, row.blocks) == (regime, 2)


@pytest.mark.parametrize("native", (True, False))
def test_groups_and_meshes(native: bool) -> None:
    def f(v: jax.Array) -> Any:
        backend = "purlin" if native else "lax"
        halves = [[0, 1], [2, 3]]
        kwargs: dict[str, Any] = {"tiled": True, "backend": backend}
        return (
            purlin.all_to_all(v, "b", 1, 0, axis_index_groups=halves, **kwargs),
            purlin.all_gather(v, "b", **kwargs),
            purlin.reduce_scatter(v, "a", "sum", **kwargs),
            purlin.pmax(v, ("a", "b"), backend=backend),
        )

    found = purlin.explain(sharded(f, reordered_2x4(), check_vma=False), X)
    assert {(r.op, r.reduce): r.world for r in found} == {
        ("all_to_all", ""): 2,
        ("all_gather", ""): 4,
        ("reduce_scatter", "sum"): 2,
        ("all_reduce", "max"): 8,
    }
    assert {r.by for r in found} == {"purlin" if native else "jax.lax"}
    assert len(found) == len(found.rows) == 4


@pytest.mark.usefixtures("auto")
def test_a_dtype_that_falls() -> None:
    row = one(purlin.explain(sharded(psum, mesh(4)), jnp.ones((16, 8), jnp.int4)))
    assert (row.by, row.op, row.reduce, row.world) == ("jax.lax", "all_reduce", "sum", 4)
    assert (row.regime, row.atom, row.blocks) == ("", "", 0)
    assert row.reason == "dtype int4 has fewer than 8 bits"
    assert row.site == line(psum, "purlin.psum")


@pytest.mark.usefixtures("auto")
def test_several_reasons() -> None:
    def f(v: jax.Array) -> Any:
        low = purlin.all_to_all(v.astype(jnp.int4), "x", 1, 0, tiled=True)
        asked = purlin.pmax(v, "x", backend="lax")
        return low, asked, purlin.pmin(v, "x")

    specs = (P("x"), P(), P())
    found = purlin.explain(sharded(f, mesh(4), out_specs=specs), X)
    reasons = {row.site: row.reason for row in found}
    assert reasons == {
        line(f, "purlin.all_to_all"): "dtype int4 has fewer than 8 bits",
        line(f, "purlin.pmax"): "asked for: backend='lax'",
        line(f, "purlin.pmin"): "",
    }


@pytest.mark.parametrize("ask", (lambda: purlin.backend("lax"), None))
def test_backends_that_are_asked_for(
    ask: Callable[[], AbstractContextManager[None]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ask is None:
        monkeypatch.setenv("PURLIN_BACKEND", "lax")
        row = one(purlin.explain(sharded(psum, mesh(4)), X))
    else:
        with ask():
            row = one(purlin.explain(sharded(psum, mesh(4)), X))
    assert (row.by, row.reason) == ("jax.lax", "asked for: backend='lax'")


def test_a_product_that_jax_lax_gathers() -> None:
    def f(v: jax.Array) -> jax.Array:
        return purlin.all_reduce(v, "x", "prod", backend="lax")

    row = one(purlin.explain(sharded(f, mesh(4), check_vma=False), X))
    assert (row.by, row.op, row.site) == ("jax.lax", "all_gather", line(f, "purlin.all_reduce"))
    assert row.reason == "asked for: backend='lax'"


@pytest.mark.parametrize("kwargs", ({}, {"backend": "purlin"}))
def test_what_would_be_an_error_is_explained(kwargs: dict[str, str]) -> None:
    x = jnp.ones((16, 8), jnp.int4)
    program = sharded(lambda v: psum(v, **kwargs), mesh(4))
    row = one(purlin.explain(program, x))
    assert row.reason == "dtype int4 has fewer than 8 bits; an error in strict mode, which is on"
    with pytest.raises(purlin.FallbackError):
        program(x)


def test_a_reason_that_is_known_in_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_late(monkeypatch)
    row = one(purlin.explain(sharded(psum, mesh(4)), X))
    assert (row.by, row.site) == ("jax.lax", line(psum, "purlin.psum"))
    assert row.reason.startswith(LATE_REASON)


@pytest.mark.usefixtures("auto")
@pytest.mark.parametrize("late", (False, True))
def test_derivatives(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(v: jax.Array) -> jax.Array:
        native = purlin.all_gather(v, "x", tiled=True)
        asked = purlin.all_gather(v + 1, "x", tiled=True, backend="lax")  # XLA joins what is equal
        return (native**3 + jnp.sin(asked) ** 2).sum()

    if late:
        refuse_late(monkeypatch)
    found = purlin.explain(sharded(jax.grad(loss), mesh(4)), X)
    native = [r for r in found if r.site == line(loss, "native =")]
    asked = [r for r in found if r.site == line(loss, "asked =")]
    assert sorted(r.op for r in native) == sorted(r.op for r in asked)
    assert sorted(r.op for r in native) == ["all_gather", "reduce_scatter"]
    reason = LATE_REASON if late else ""
    assert {(r.by, r.reason) for r in native} == {("jax.lax" if late else "purlin", reason)}
    assert {(r.by, r.reason) for r in asked} == {("jax.lax", "asked for: backend='lax'")}


def test_jax_lax_beside_purlin_and_inside_a_loop() -> None:
    def f(v: jax.Array) -> Any:
        def step(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            c = purlin.psum(c, "x") * 0.1
            ring = [(i, (i + 1) % 4) for i in range(4)]
            return jax.lax.ppermute(c, "x", ring), None

        looped = jax.lax.scan(step, v, length=5)[0]
        return looped, jax.lax.psum(v, "x")

    found = purlin.explain(sharded(f, mesh(4), check_vma=False), X)
    assert {(r.by, r.op, r.site, r.world) for r in found} == {
        ("purlin", "all_reduce", line(f, "purlin.psum"), 4),
        ("jax.lax", "collective_permute", line(f, "jax.lax.ppermute"), 4),
        ("jax.lax", "all_reduce", line(f, "jax.lax.psum"), 4),
    }
    assert len(found) == 3
    reasons = {r.op: r.reason for r in found if r.by == "jax.lax"}
    assert reasons["all_reduce"] == "written as psum of jax.lax"


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return a @ b


@pytest.mark.parametrize("jitted", (False, True))
def test_collectives_that_sharding_adds(jitted: bool) -> None:
    def struct(*spec: str | None) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh(4), P(*spec))
        return jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=sharding)

    fn: Fn = jax.jit(_matmul) if jitted else _matmul
    row = one(purlin.explain(fn, struct(None, "x"), struct("x", None)))
    assert (row.by, row.op, row.reduce, row.world) == ("XLA", "all_reduce", "sum", 4)
    assert row.operands == ("float32[16,16]",)
    assert row.reason == "added by sharding, for dot_general"
    assert row.site == line(_matmul, "a @ b")

    def whole(a: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(a * 2, NamedSharding(mesh(4), P()))

    row = one(purlin.explain(whole, struct("x", None)))
    assert (row.by, row.op, row.world) == ("XLA", "all_gather", 4)


def test_ulysses_in_plain_jit_has_the_site_of_the_user() -> None:
    def attend(q: jax.Array) -> jax.Array:
        return purlin.ulysses_attention(q, q, q, axis_name="x", mesh=mesh(4))

    found = purlin.explain(attend, jax.ShapeDtypeStruct((1, 16, 8, 4), jnp.float32))
    assert [len(r.operands) for r in found] == [3, 1]
    assert {(r.by, r.op, r.world) for r in found} == {("purlin", "all_to_all", 4)}
    assert {r.site for r in found} == {line(attend, "purlin.ulysses_attention")}


def test_nothing_to_explain() -> None:
    found = purlin.explain(lambda v: v + 1, X)
    assert (len(found), found.rows, str(found)) == (0, (), NONE)
    assert repr(found) == NONE


@pytest.mark.usefixtures("auto")
def test_nothing_runs_and_what_was_traced_is_explained_the_same() -> None:
    traces = []

    def f(v: jax.Array) -> jax.Array:
        traces.append(v)
        return purlin.psum(v.astype(jnp.int4), "x").astype(v.dtype) + purlin.psum(v, "x")

    program = sharded(f, mesh(4), out_specs=P())
    x = jnp.ones((16, 8))
    fresh = purlin.explain(program, x)
    jax.block_until_ready(program(x))
    before, traced = purlin.native_calls(), len(traces)
    again = purlin.explain(program, x)
    assert again == fresh
    assert {r.reason for r in again} == {"", "dtype int4 has fewer than 8 bits"}
    assert purlin.native_calls() == before
    assert len(traces) == traced + 1
    # What explain traced is not what runs: its scopes hold the call sites.
    assert "[test_explain" not in program.lower(x).compile().as_text()


def test_static_and_keyword_arguments() -> None:
    def f(v: jax.Array, power: int, *, scale: jax.Array) -> jax.Array:
        return sharded(lambda u: psum(u) ** power, mesh(4))(v) * scale

    found = purlin.explain(jax.jit(f, static_argnums=1), X, 3, scale=jnp.float32(2))
    assert one(found).by == "purlin"


GPU = """HloModule jit_f, is_scheduled=true, num_partitions=8

FileNames
1 "/home/me/model.py"
2 "/home/me/train.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=8 end_column=9}
2 {file_name_id=2 function_name_id=1 line=9 end_line=9 column=8 end_column=9}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %add.1 = bf16[] add(%a, %b)
}

ENTRY %main (p: bf16[8,4]) -> bf16[8,4] {
  %p = bf16[8,4]{1,0:T(8,128)} parameter(0)
  %id = u32[] partition-id()
  %s = bf16[8,4]{1,0} all-reduce-start(%p), channel_id=1, replica_groups=[2,4]<=[8], \
to_apply=%add, metadata={op_name="jit(f)/psum" stack_frame_id=2}
  %d = bf16[8,4]{1,0} all-reduce-done(%s), metadata={op_name="jit(f)/psum" stack_frame_id=2}
  %g = (bf16[8,4]{1,0}, bf16[16,4]{1,0}) all-gather-start(%d), replica_groups={{0,1},{2,3}}, \
metadata={op_name="jit(f)/dot_general" source_file="/home/me/old.py" source_line=3}
  %h = bf16[16,4]{1,0} all-gather-done(%g)
  %k = (bf16[8,4]{1,0}) custom-call(%id, %p), custom_call_target="purlin_collective_v2", \
backend_config={"custom_call_config":{"attributes":"{atom = \\"generic\\", blocks = 16 : i64, \
op = \\"all_reduce\\", reduce = \\"sum\\", regime = \\"packet\\", site = \\"model.py:5\\", \
world = 8 : i64}"}}
  ROOT %r = bf16[8,4]{1,0} reduce-scatter(%p), replica_groups={}, to_apply=%add
}
"""


def test_text_of_a_gpu_program() -> None:
    reduce, gather, native, last = parse(GPU, ())
    assert (reduce.by, reduce.op, reduce.reduce) == ("jax.lax", "all_reduce", "sum")
    assert (reduce.world, reduce.operands, reduce.site) == (4, ("bfloat16[8,4]",), "model.py:7")
    assert (gather.by, gather.world, gather.site) == ("XLA", 2, "old.py:3")
    assert (native.by, native.op, native.regime, native.atom) == (
        "purlin",
        "all_reduce",
        "packet",
        "generic",
    )
    assert (native.blocks, native.world, native.site) == (16, 8, "model.py:5")
    assert native.operands == ("bfloat16[8,4]",)
    assert (last.by, last.op, last.world, last.site) == ("XLA", "reduce_scatter", 8, "")


def test_a_program_from_a_cache_that_was_compiled_without_explain() -> None:
    text = GPU.replace("jit(f)/psum", "jit(f)/jvp(purlin/all_reduce)/psum")
    handed = [Handed("all_reduce", "model.py:7", "why"), Handed("all_reduce", "model.py:8", "not")]
    row = parse(text, handed)[0]
    assert (row.by, row.site, row.reason) == ("jax.lax", "model.py:7", "why")


@pytest.mark.parametrize(
    ("groups", "world"),
    (
        ("{{0,1,2},{3,4,5}}", 3),
        ("[3,2]<=[2,3]T(1,0)", 2),
        ("mesh['x'=4,'y'=2] {'x'}", 4),
        ("mesh['x'=4,'y'=2] {'x','y'}", 8),
        ("mesh['x'=8] {'x':(2)4}", 4),
        ("{}", 6),
    ),
)
def test_notations_of_groups(groups: str, world: int) -> None:
    text = f"""HloModule m, num_partitions=6
ENTRY %m (p: s8[2]) -> s8[2] {{
  %p = s8[2] parameter(0)
  ROOT %r = s8[2] all-to-all(%p), replica_groups={groups}, dimensions={{0}}
}}
"""
    row = one(parse(text, ()))
    assert (row.world, row.operands) == (world, ("int8[2]",))
