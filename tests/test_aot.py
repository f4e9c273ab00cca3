"""Programs compiled ahead of time, or by an earlier process, run natively and give the same."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.serialize_executable import serialize

from tests.harness import (
    FOUR_OPS,
    all_four,
    all_four_expected,
    assert_same_bits,
    custom_calls,
    fresh_python,
    mesh,
    random_array,
    run_counted,
    sharded,
)

X = random_array("float32", (16, 8))


def test_lower_compile_run() -> None:
    program = sharded(all_four, mesh(4), check_vma=False)
    compiled = program.lower(jax.ShapeDtypeStruct(X.shape, X.dtype)).compile()
    assert custom_calls(compiled.as_text()) == 4
    for x in (X, X * 2):
        got = run_counted(compiled, x, op="reduce_scatter", calls=4)
        assert_same_bits(got, all_four_expected(x, 4))


# A program of every collective with its gradient, in an interpreter with a cache in argv[1].
CACHED = """
import json, sys
import jax, numpy as np
import purlin_jax
from tests.harness import all_four, mesh, sharded

folder, regime, *order = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_compilation_cache_dir", folder)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
over = mesh(4, order=[int(i) for i in order])
x = jax.device_put(np.load(folder + "/x.npy"), jax.NamedSharding(over, jax.P("x")))
events.clear()
with purlin_jax.policy(regime):
    y = jax.block_until_ready(sharded(all_four, over, check_vma=False)(x))
np.savez(folder + "/y.npz", **y)
print(json.dumps({
    "hits": events.count("/jax/compilation_cache/cache_hits"),
    "misses": events.count("/jax/compilation_cache/cache_misses"),
    "calls": purlin_jax.native_calls(),
}))
"""


def _cached(folder: Path, regime: str, order: tuple[int, ...]) -> dict[str, Any]:
    ran = json.loads(fresh_python(CACHED, folder, regime, *order))
    with np.load(folder / "y.npz") as y:
        assert_same_bits(dict(y), all_four_expected(X, 4))
    assert ran["calls"] == dict.fromkeys(FOUR_OPS, 4)
    return ran


def test_persistent_compilation_cache(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    order = (0, 1, 2, 3)
    first = _cached(tmp_path, "auto", order)
    assert (first["hits"], first["misses"]) == (0, 1)
    second = _cached(tmp_path, "auto", order)
    assert (second["hits"], second["misses"]) == (1, 0)
    # What decides how a collective runs is part of the program.
    other = _cached(tmp_path, "packet", order)
    assert (other["hits"], other["misses"]) == (0, 1)
    _cached(tmp_path, "auto", (2, 3, 1, 0))  # found again or not, the ranks are those of the mesh


LOAD = """
import json, pickle, sys
import jax, numpy as np
import purlin_jax
from jax.experimental.serialize_executable import deserialize_and_load
from tests.harness import mesh

folder = sys.argv[1]
jax.config.update("jax_num_cpu_devices", 4)
with open(folder + "/program", "rb") as f:
    program = deserialize_and_load(*pickle.load(f), execution_devices=jax.devices())
x = jax.device_put(np.load(folder + "/x.npy"), jax.NamedSharding(mesh(4), jax.P("x")))
np.savez(folder + "/y.npz", **jax.block_until_ready(program(x)))
print(json.dumps(purlin_jax.native_calls()))
"""


def test_serialized_executable(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    compiled = sharded(all_four, mesh(4), check_vma=False).lower(X).compile()
    (tmp_path / "program").write_bytes(pickle.dumps(serialize(compiled)))
    assert json.loads(fresh_python(LOAD, tmp_path)) == dict.fromkeys(FOUR_OPS, 4)
    with np.load(tmp_path / "y.npz") as y:
        assert_same_bits(dict(y), all_four_expected(X, 4))
