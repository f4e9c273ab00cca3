"""Collectives of rows whose counts are data of the program: all_to_all_v and its kin."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from purlin_jax import groups as groups_lib
from purlin_jax._compat import make_varying
from purlin_jax.backend import scope
from purlin_jax.joined import Joined, batches, calling, join
from purlin_jax.lax_forms import counted_equivalent
from purlin_jax.policy import Policy
from purlin_jax.varlen_primitive import CountedParams, Parts, bind

PyTree = Any


class _Sizes(NamedTuple):
    """Rows for each rank; and where they are numbers, [sender, receiver], also the first rows."""

    own: jax.Array
    matrices: tuple[np.ndarray, ...] = ()


def all_to_all_v(
    x: PyTree,
    send_sizes: Any,
    axis_name: groups_lib.AxisName,
    *,
    capacity: int | None = None,
    fill: int | None = 0,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    backend: str | None = None,
    policy: Policy | str | None = None,
) -> tuple[PyTree, jax.Array]:
    """Send each rank as many rows as it is to get; counts are data, and only those rows travel.

    Block p of `x`, of send_sizes[p] rows, goes to rank p; blocks lie one behind another. What comes
    lies in the result in the same way, in rank order.

    Args:
      x: array or pytree of arrays [rows, ...] with as many rows each, of any dtype of at least 8
        bits; all leaves travel together. Rows behind the last block are not sent, and their
        gradient is 0.
      send_sizes: traced int32 or int64 [ranks], rows for each rank. Or numbers, known to all: a
        sequence of them if all ranks send alike, else [sender, receiver].
      axis_name: bound mesh axis, or a tuple of them (the first slowest).
      capacity: rows of the result. With numbers it is what they need unless told otherwise.
      fill: 0 for zeros behind what is received, None to leave those rows undefined.
      axis_index_groups: groups of indices of the axis that exchange among themselves.
      backend: "auto", "purlin" or "lax"; None takes the context or PURLIN_BACKEND. jax.lax sends
        all rows to all ranks.
      policy: a Policy or the name of a regime; None takes the context or PURLIN_POLICY.

    Returns:
      (out, recv_sizes): a pytree like `x` of arrays [capacity, ...], and the rows that came from
      each rank, [ranks] of the dtype of send_sizes.

    Raises:
      NameError: the axis is not bound by a jax.shard_map around the call.
      ValueError: arrays, counts or capacity do not fit each other, as far as shapes and numbers
        tell.
      TypeError: counts that are no integers.
      jax.errors.JaxRuntimeError: when the program runs: traced counts that are negative or do not
        fit `x` or `capacity`. Nothing has been written out of bounds then. On GPUs the process
        cannot use its devices any more; purlin.last_report() names ranks and values.
    """
    joined = join("all_to_all_v", axis_name, axis_index_groups, backend, policy)
    sizes = _sizes(joined, send_sizes)
    if sizes.matrices:
        (matrix,) = sizes.matrices
        _check_rows(joined, x, matrix.sum(1))
        needed = int(matrix.sum(0).max(initial=0))
        capacity = _enough(joined, capacity, needed)
    if capacity is None:
        raise ValueError(
            "purlin.all_to_all_v: the result needs a static number of rows; pass capacity="
        )
    results, received = _run(joined, x, sizes, capacity, fill)
    return results, received


def all_gather_v(
    x: PyTree,
    size: Any,
    axis_name: groups_lib.AxisName,
    *,
    capacity: int | None = None,
    fill: int | None = 0,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    backend: str | None = None,
    policy: Policy | str | None = None,
) -> tuple[PyTree, jax.Array]:
    """Gather the first rows of every rank's array, as many as each says, one behind another.

    Args:
      x, axis_name, fill, axis_index_groups, backend, policy: as for all_to_all_v.
      size: traced int32 or int64 scalar, rows of `x` to gather from this rank. Or numbers, one for
        each rank.
      capacity: rows of the result; by default all that may come, with numbers what they need.

    Returns:
      (out, sizes): a pytree like `x` of arrays [capacity, ...], and the rows of each rank.

    Raises:
      As all_to_all_v.
    """
    joined = join("all_gather_v", axis_name, axis_index_groups, backend, policy)
    numbers = _numbers(joined, size, (joined.world,))
    if numbers is None:
        own = _integers(joined, size, ())
        sizes = _Sizes(jnp.broadcast_to(own, (joined.world,)))
        capacity = _rows(joined, x) * joined.world if capacity is None else capacity
    else:
        sizes = _known(joined, np.repeat(numbers[:, None], joined.world, 1))
        _check_rows(joined, x, numbers)
        capacity = _enough(joined, capacity, int(numbers.sum()))
    return _run(joined, x, sizes, capacity, fill)


def reduce_scatter_v(
    x: PyTree,
    sizes: Any,
    axis_name: groups_lib.AxisName,
    op: str = "sum",
    *,
    capacity: int | None = None,
    fill: int | None = 0,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    backend: str | None = None,
    policy: Policy | str | None = None,
) -> tuple[PyTree, jax.Array]:
    """Reduce over ranks; rank p gets block p of the result, of sizes[p] rows.

    Values are folded in rank order, as in all_reduce.

    Args:
      x, axis_name, fill, axis_index_groups, backend, policy: as for all_to_all_v; leaves of one
        dtype travel together.
      sizes: traced int32 or int64 [ranks], rows of each block, the same on all ranks. Or numbers.
      op: "sum", "prod", "max", "min", or for integers and booleans "and", "or", "xor".
      capacity: rows of the result; by default those of `x`, with numbers the largest of them.

    Returns:
      (out, size): a pytree like `x` of arrays [capacity, ...], and the rows of the own block.

    Raises:
      As all_to_all_v; the run-time error also where ranks disagree on the sizes.
    """
    joined = join("reduce_scatter_v", axis_name, axis_index_groups, backend, policy, op)
    numbers = _numbers(joined, sizes, (joined.world,))
    if numbers is None:
        given = _Sizes(_integers(joined, sizes, (joined.world,)))
        capacity = _rows(joined, x) if capacity is None else capacity
    else:
        given = _known(joined, np.repeat(numbers[None], joined.world, 0))
        _check_rows(joined, x, numbers.sum(keepdims=True))
        capacity = _enough(joined, capacity, int(numbers.max(initial=0)))
    results, received = _run(joined, x, given, capacity, fill)
    return results, received[0]


def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: groups_lib.AxisName,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    backend: str | None = None,
    policy: Policy | str | None = None,
) -> jax.Array:
    """jax.lax.ragged_all_to_all: send slices of rows to where the sender says.

    Rows send_sizes[p] from input_offsets[p] on go to rank p, there to output_offsets[p] on. Also
    on CPU devices, for which XLA has no such collective. Several slices for each rank, [ranks * k]
    numbers, go in k calls, one after another.

    Args:
      operand: [rows, ...] of any dtype of at least 8 bits. Slices may overlap, but then the
        derivative ends in the run-time error.
      output: [capacity, ...]; its rows that nobody writes are kept.
      input_offsets, send_sizes, output_offsets, recv_sizes: int32 or int64 [ranks * k], all of one
        dtype. recv_sizes is checked against what the peers send.
      axis_name, axis_index_groups, backend, policy: as for all_to_all_v.

    Returns:
      An array like `output`.

    Raises:
      As all_to_all_v; the run-time error also for rows that overlap in the result, and for
      recv_sizes that are not what comes.
    """
    with calling("ragged_all_to_all"):
        joined = join("all_to_all_v", axis_name, axis_index_groups, backend, policy)
    numbers = {
        "input_offsets": jnp.asarray(input_offsets),
        "send_sizes": jnp.asarray(send_sizes),
        "output_offsets": jnp.asarray(output_offsets),
        "recv_sizes": jnp.asarray(recv_sizes),
    }
    dtype = jnp.result_type(*numbers.values())
    shape = numbers["send_sizes"].shape
    slices, rest = divmod(numbers["send_sizes"].size, joined.world)
    for name, value in numbers.items():
        if value.shape != shape or len(shape) != 1 or rest or not slices:
            raise ValueError(
                f"purlin.ragged_all_to_all: {name} has shape {value.shape}; the four arrays "
                f"of numbers need one shape, [{joined.world} * k] for {joined.world} ranks"
            )
    _rows(joined, operand)
    if output.shape[1:] != operand.shape[1:] or output.dtype != operand.dtype or not output.ndim:
        raise ValueError(
            f"purlin.ragged_all_to_all: output is {jax.typeof(output).str_short()} and operand "
            f"{jax.typeof(operand).str_short()}; they may differ in the number of rows alone"
        )
    starts, sizes, places, expected = (
        _integers(joined, value.astype(dtype), shape).reshape(joined.world, slices)
        for value in numbers.values()
    )
    for k in range(slices):
        output, _ = _run(
            joined,
            operand,
            _Sizes(sizes[:, k]),
            output.shape[0],
            None,
            expected=expected[:, k],
            places=(starts[:, k], places[:, k]),
            kept=output,
        )
    return output


def send_rows(
    arrays: Sequence[jax.Array],
    capacity: int,
    *,
    starts: np.ndarray,
    sizes: np.ndarray,
    places: np.ndarray,
    axis_name: groups_lib.AxisName,
    backend: str | None,
) -> list[jax.Array]:
    """ragged_all_to_all into zeros, with numbers that are known and fit: [sender, receiver].

    `arrays` travel together, and have as many rows each.
    """
    joined = join("all_to_all_v", axis_name, None, backend, None)
    rank = groups_lib.own_rank(joined.names, joined.groups)
    first, rows, last = (jnp.asarray(m, jnp.int32)[rank] for m in (starts, sizes, places))
    moved, _ = _run(
        joined,
        list(arrays),
        _Sizes(rows, (sizes, starts, places)),
        capacity,
        None,
        expected=jnp.asarray(sizes, jnp.int32)[:, rank],
        places=(first, last),
        kept=[jnp.zeros((capacity, *x.shape[1:]), x.dtype) for x in arrays],
    )
    return moved


def ppermute(
    x: PyTree,
    axis_name: groups_lib.AxisName,
    perm: Sequence[tuple[int, int]],
    *,
    backend: str | None = None,
    policy: Policy | str | None = None,
) -> PyTree:
    """jax.lax.ppermute: send arrays from rank to rank.

    Args:
      x: array or pytree of arrays of any dtype of at least 8 bits; all leaves travel together.
      axis_name: bound mesh axis, or a tuple of them (the first slowest).
      perm: pairs (source, destination); each rank at most once as either.
      backend, policy: as for all_to_all_v.

    Returns:
      A pytree like `x`; zeros on ranks that are no destination.

    Raises:
      NameError: the axis is not bound by a jax.shard_map around the call.
      ValueError: a rank that does not exist, or that is there twice.
    """
    joined = join("ppermute", axis_name, None, backend, policy)
    matrix = np.zeros((joined.world, joined.world), np.int64)
    for pair in perm:
        if not all(0 <= rank < joined.world for rank in pair):
            raise ValueError(
                f"purlin.ppermute: {tuple(pair)} names a rank outside the {joined.world} of the "
                "axis"
            )
        matrix[tuple(pair)] += 1
    if (matrix.sum(0) > 1).any() or (matrix.sum(1) > 1).any():
        raise ValueError(
            f"purlin.ppermute: {list(map(tuple, perm))} names a rank twice; each may be source "
            "once and destination once"
        )
    leaves, tree = jax.tree.flatten(x)
    if not leaves:
        return x
    whole = [jnp.asarray(leaf)[None] for leaf in leaves]  # one row each
    moved, _ = _run(joined, whole, _known(joined, matrix), 1, 0)
    return jax.tree.unflatten(tree, [y[0] for y in moved])


def _run(
    joined: Joined,
    x: PyTree,
    sizes: _Sizes,
    capacity: int,
    fill: int | None,
    *,
    expected: jax.Array | None = None,
    places: tuple[jax.Array, jax.Array] | None = None,
    kept: PyTree | None = None,
) -> tuple[PyTree, jax.Array]:
    """Send checked operands through the primitive, several in one call where types allow."""
    if fill not in (0, None):
        raise ValueError(f"purlin.{joined.name}: fill={fill!r} is neither 0 nor None")
    capacity = _static(joined, capacity)
    leaves, tree = jax.tree.flatten(x)
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    keeps = [] if kept is None else jax.tree.leaves(kept)
    _rows(joined, x)
    for leaf in arrays:
        joined.require_dtype(leaf.dtype)
    params = CountedParams(
        op=joined.op,
        reduce=joined.reduce,
        axes=joined.names,
        groups=joined.groups,
        world=joined.world,
        operands=len(arrays),
        capacity=capacity,
        known=tuple(tuple(map(tuple, m.tolist())) for m in sizes.matrices),
        expects=expected is not None,
        placed=places is not None,
        keeps=kept is not None,
        fill=fill is not None and kept is None,
        policy=joined.policy,
        backend=joined.backend,
        site=joined.site,
        name=joined.name,
    )
    with jax.named_scope(scope(joined.op, joined.site)):
        if joined.goes_to_lax(arrays):
            *results, received = counted_equivalent(
                params, Parts(arrays, sizes.own, expected, places, keeps).operands
            )
            return jax.tree.unflatten(tree, results), received
        given = Parts(arrays, sizes.own, expected, places, keeps)
        data, count, expects, where, keeping = jax.tree.map(
            lambda v: make_varying(v, joined.names), tuple(given)
        )
        found: dict[int, jax.Array] = {}
        received = count
        for batch in batches(arrays, same_dtype=bool(joined.reduce)):
            part = Parts(
                [data[i] for i in batch],
                count,
                expects,
                where,
                [keeping[i] for i in batch] if keeping else [],
            )
            *out, received = bind(params._replace(operands=len(batch)), part)
            found.update(zip(batch, out, strict=True))
    return jax.tree.unflatten(tree, [found[i] for i in range(len(arrays))]), received


def _rows(joined: Joined, x: PyTree) -> int:
    """Rows of all leaves."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(x)]
    if not shapes or any(not shape for shape in shapes) or len({s[0] for s in shapes}) > 1:
        raise ValueError(
            f"purlin.{joined.name}: operands of shapes {shapes}; give one or more arrays with as "
            "many rows (leading axis) each"
        )
    return int(shapes[0][0])


def _sizes(joined: Joined, given: Any) -> _Sizes:
    world = joined.world
    numbers = _numbers(joined, given, (world,), (world, world))
    if numbers is None:
        return _Sizes(_integers(joined, given, (world,)))
    return _known(joined, np.broadcast_to(numbers, (world, world)))


def _numbers(joined: Joined, given: Any, *shapes: tuple[int, ...]) -> np.ndarray | None:
    """Counts that are known at trace time, or None if they are traced."""
    if isinstance(given, jax.Array):
        return None
    if not isinstance(given, np.ndarray | list | tuple) or any(
        isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(given)
    ):
        return None
    try:
        numbers = np.asarray(given)
    except ValueError:
        raise ValueError(
            f"purlin.{joined.name}: counts {given} are no array; give as many for each rank"
        ) from None
    if numbers.shape not in shapes:
        return None
    if numbers.dtype.kind not in "iu":
        raise TypeError(f"purlin.{joined.name}: counts are integers, not {numbers.dtype}")
    if (numbers < 0).any():
        raise ValueError(f"purlin.{joined.name}: counts {numbers.tolist()} must not be negative")
    return numbers.astype(np.int64)


def _known(joined: Joined, matrix: np.ndarray) -> _Sizes:
    """Counts that all ranks know, as [sender, receiver]."""
    rank = groups_lib.own_rank(joined.names, joined.groups)
    return _Sizes(jnp.asarray(matrix, jnp.int32)[rank], (matrix,))


def _integers(joined: Joined, given: Any, shape: tuple[int, ...]) -> jax.Array:
    """Traced counts as int32 or int64."""
    counts = jnp.asarray(given)
    if not jnp.issubdtype(counts.dtype, jnp.integer):
        raise TypeError(f"purlin.{joined.name}: counts are integers, not {counts.dtype}")
    if counts.shape != shape:
        raise ValueError(
            f"purlin.{joined.name}: counts of shape {list(counts.shape)}, expected {list(shape)} "
            f"for {joined.world} ranks"
        )
    if counts.dtype in (jnp.int32, jnp.int64):
        return counts
    return counts.astype(jnp.int64 if counts.dtype == jnp.uint64 else jnp.int32)


def _check_rows(joined: Joined, x: PyTree, needed: np.ndarray) -> None:
    """Raise ValueError where a rank would send more rows than it has."""
    rows = _rows(joined, x)
    for rank, n in enumerate(needed):
        if n > rows:
            whose = f"of rank {rank} " if len(needed) > 1 else ""
            raise ValueError(
                f"purlin.{joined.name}: the counts {whose}need {n} rows and the operand has {rows}"
            )


def _static(joined: Joined, capacity: Any) -> int:
    """`capacity` as a number of rows."""
    try:
        rows = operator.index(capacity)
    except TypeError:
        raise TypeError(
            f"purlin.{joined.name}: capacity={capacity} is no integer that is known when the "
            "program is traced; shapes are static"
        ) from None
    if rows < 0:
        raise ValueError(f"purlin.{joined.name}: capacity={rows} must not be negative")
    return rows


def _enough(joined: Joined, capacity: int | None, needed: int) -> int:
    if capacity is not None and _static(joined, capacity) < needed:
        raise ValueError(
            f"purlin.{joined.name}: a rank gets {needed} rows, and capacity={capacity}; raise it, "
            "or leave it out"
        )
    return needed if capacity is None else capacity
