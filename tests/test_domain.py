"""Importing purlin_jax touches no backend, and says so where jaxlib is too old."""

from __future__ import annotations

import pytest

from purlin_jax import _compat, _native, domain
from tests.harness import fresh_python


def test_import_starts_no_backend() -> None:
    code = """
import purlin_jax
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized(), purlin_jax.native_calls(), purlin_jax.native_regimes())
import jax
jax.devices("cpu")
print(xla_bridge.backends_are_initialized())
"""
    assert fresh_python(code).split("\n")[:2] == ["False {} {}", "True"]


def test_import_before_jax_distributed() -> None:
    code = """
import socket, jax, purlin_jax
with socket.socket() as s:
    s.bind(("localhost", 0))
    port = s.getsockname()[1]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{port}", num_processes=1, process_id=0)
f = jax.shard_map(
    lambda v: purlin_jax.all_reduce(v, "x"),
    mesh=jax.sharding.Mesh(jax.devices(), ("x",)), in_specs=jax.P("x"), out_specs=jax.P())
print(jax.jit(f)(jax.numpy.arange(2.0)).block_until_ready(), purlin_jax.native_calls())
"""
    assert fresh_python(code) == "[1.] {'all_reduce': 2}\n"


def test_tracing_starts_no_native_part() -> None:
    code = """
import jax, purlin_jax
from purlin_jax import domain
jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.sharding.Mesh(jax.devices("cpu"), ("x",))
f = jax.jit(jax.shard_map(
    lambda v: purlin_jax.all_to_all(v, "x", 0, 0, tiled=True),
    mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x")))
x = jax.numpy.arange(8)
f.trace(x)
print(domain._platforms(), purlin_jax.native_calls())
f(x).block_until_ready()
print(domain._platforms(), purlin_jax.native_calls())
"""
    lines = fresh_python(code).split("\n")
    assert lines[:2] == ["set() {}", "{'cpu'} {'all_to_all': 2}"]


@pytest.mark.parametrize(("major", "minor"), ((0, -1), (1, 0), (-1, 0)))
def test_another_ffi_is_an_import_error(
    major: int, minor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = _native.ffi_api
    runtime = (built[0] + major, built[1] + minor)
    monkeypatch.setattr(_compat, "runtime_ffi_api", lambda: runtime)
    with pytest.raises(ImportError) as raised:
        domain.check_ffi_api()
    text = str(raised.value)
    assert f"XLA FFI {built[0]}.{built[1]} and" in text
    assert f"speaks {runtime[0]}.{runtime[1]}; install a newer jaxlib" in text
    assert "\n" not in text


@pytest.mark.parametrize("newer", (0, 1))
def test_the_same_or_a_newer_minor_version_fits(
    newer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = _native.ffi_api
    monkeypatch.setattr(_compat, "runtime_ffi_api", lambda: (built[0], built[1] + newer))
    domain.check_ffi_api()


def test_without_headers_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "runtime_ffi_api", lambda: None)
    domain.check_ffi_api()


def test_the_installed_jaxlib_says_its_version() -> None:
    runtime = _compat.runtime_ffi_api()
    assert runtime is not None
    assert runtime >= _native.ffi_api
