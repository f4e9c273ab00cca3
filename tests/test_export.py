"""Exported programs run where purlin_jax has only been imported, on any order of devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import pytest
from jax.sharding import NamedSharding

import purlin_jax as purlin
from purlin_jax import domain
from tests.harness import (
    FOUR_OPS,
    Fn,
    P,
    all_four,
    all_four_expected,
    assert_same_bits,
    fresh_python,
    mesh,
    random_array,
    run_counted,
    sharded,
    to_numpy,
)

X = random_array("float32", (16, 8))
SHAPE = jax.ShapeDtypeStruct(X.shape, X.dtype)


def _export(f: Fn, shape: Any = SHAPE, **kwargs: Any) -> jax.export.Exported:
    program = sharded(f, mesh(4), check_vma=False)
    return jax.export.export(program, disabled_checks=purlin.export_checks(), **kwargs)(shape)


LOAD = """
import json, sys
import jax, jax.export, numpy as np
import purlin_jax
jax.config.update("jax_num_cpu_devices", 6)
folder, *order = sys.argv[1:]
assert not purlin_jax.domain._started
exported = jax.export.deserialize(bytearray(open(folder + "/program", "rb").read()))
devices = np.array(jax.devices())[[int(i) for i in order]]
mesh = jax.sharding.Mesh(devices, ("y",))
x = jax.device_put(np.load(folder + "/x.npy"), jax.NamedSharding(mesh, jax.P("y")))
np.savez(folder + "/y.npz", **jax.jit(exported.call)(x))
print(json.dumps(purlin_jax.native_calls()))
"""


def test_run_in_a_fresh_process(tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(_export(all_four).serialize())
    np.save(tmp_path / "x.npy", X)
    # The order of the exporter; another; and devices that the exporter did not use.
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (5, 0, 4, 2)):
        counts = fresh_python(LOAD, tmp_path, *order)
        assert json.loads(counts) == dict.fromkeys(FOUR_OPS, 4)
        with np.load(tmp_path / "y.npz") as y:
            assert_same_bits(dict(y), all_four_expected(X, 4))


def test_run_in_the_exporting_process_on_another_order() -> None:
    exported = jax.export.deserialize(_export(all_four).serialize())
    for order in ((0, 1, 2, 3), (6, 1, 7, 0)):
        over = mesh(8, order=order, shape=(4,))
        x = jax.device_put(X, NamedSharding(over, P("x")))
        got = run_counted(jax.jit(exported.call), x, op="all_gather", calls=4)
        assert_same_bits(got, all_four_expected(X, 4))


def test_within_another_program() -> None:
    exported = _export(all_four)
    over = NamedSharding(mesh(4), P("x"))
    program = jax.jit(lambda v: exported.call(v * 2), in_shardings=over)
    got = run_counted(program, X, op="reduce_scatter", calls=4)
    assert_same_bits(got, all_four_expected(X * 2, 4))


def test_gradient_of_an_exported_program() -> None:
    def loss(f: Fn) -> Fn:
        return lambda v: sum((y**2).sum() for y in jax.tree.leaves(f(v)))

    over = NamedSharding(mesh(4), P("x"))
    exported = jax.export.deserialize(_export(all_four).serialize(vjp_order=1))
    got = jax.jit(jax.grad(loss(exported.call)), in_shardings=over)
    here = jax.grad(loss(sharded(all_four, mesh(4), check_vma=False)))
    # Both directions: a reduce_scatter that carries the cotangent of the all_gather, too.
    np.testing.assert_allclose(
        run_counted(got, X, op="reduce_scatter", calls=8), to_numpy(here(X)), rtol=1e-6
    )


def test_nobody_vouched() -> None:
    with pytest.raises(ValueError, match=rf"no compatibility guarantees[\s\S]*{domain.TARGET}"):
        jax.export.export(sharded(all_four, mesh(4), check_vma=False))(SHAPE)


class _Gpus:
    """A build for CUDA that must not be asked for anything."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of GPUs that the exporter does not know")


def test_gpus_of_an_exported_program_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domain, "cuda", _Gpus())
    with pytest.raises(purlin.FallbackError, match="an exported program may run on other GPUs"):
        _export(all_four, platforms=["cuda"])
    monkeypatch.delenv("PURLIN_FALLBACK")
    text = _export(all_four, platforms=["cuda"]).mlir_module()
    assert domain.TARGET not in text
    for op in FOUR_OPS:
        assert f"stablehlo.{op}" in text


def test_one_export_for_several_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PURLIN_FALLBACK")
    exported = jax.export.deserialize(_export(all_four, platforms=["cpu", "cuda"]).serialize())
    x = jax.device_put(X, NamedSharding(mesh(4), P("x")))
    got = run_counted(jax.jit(exported.call), x, op="all_to_all", calls=4)
    assert_same_bits(got, all_four_expected(X, 4))


@pytest.mark.parametrize("op", FOUR_OPS)
def test_symbolic_shapes_go_to_jax_lax(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("16*b, 8"), X.dtype)
    with pytest.raises(purlin.FallbackError, match=r"shape \(4\*b, 8\) is symbolic"):
        _export(lambda v: all_four(v)[op], shape)
    monkeypatch.delenv("PURLIN_FALLBACK")
    # JAX itself failed to run some programs of symbolic shapes with a shard_map in them (0.12).
    text = _export(lambda v: all_four(v)[op], shape).mlir_module()
    assert domain.TARGET not in text and f"stablehlo.{op}" in text
