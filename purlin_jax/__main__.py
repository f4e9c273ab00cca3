"""`python -m purlin_jax status | selftest | bench | tune`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import purlin_jax as purlin
from purlin_jax import (
    _compat,
    _native,
    bench,
    domain,
    measure,
    plots,
    selftest,
    together,
    tune,
)
from purlin_jax.policy import REGIMES, Policy, is_own, table, table_file


def _mesh(args: argparse.Namespace) -> Mesh:
    return Mesh(np.array(measure.devices(args.platform, args.devices)), ("i",))


def status(args: argparse.Namespace) -> int:
    """What was built, what is here, and what the domain found."""
    devices = measure.devices(args.platform, args.devices)
    print(f"purlin_jax {purlin.__version__}, jax {jax.__version__}")
    print(f"FFI API: built for {_native.ffi_api}, jaxlib speaks {_compat.runtime_ffi_api()}")
    print(f"compiler: {_native.compiler}")
    print(f"devices: {len(devices)} x {devices[0].device_kind} ({devices[0].platform})")
    if domain.cuda is None:
        print("CUDA: not built (no driver or compiler was found, or PURLIN_CUDA=off)")
    else:
        toolkit = f"{domain.cuda.toolkit // 1000}.{domain.cuda.toolkit % 1000 // 10}"
        compiler, archs = domain.cuda.compiler, domain.cuda.architectures
        print(f"CUDA: toolkit {toolkit}, {compiler}, built for {archs}")
    platform = "cuda" if devices[0].platform == "gpu" else "cpu"
    if platform == "cuda" and domain.cuda is not None:
        domain.ensure_started("cuda")
        used, size = domain.cuda.arena()
        print(f"arena: {used >> 20} of {size >> 20} MiB in use on each GPU")
        ordinals = [d.local_hardware_id for d in devices]
        peers = "yes" if domain.cuda.can_peer(ordinals) else "no"
        print(f"peer access between all GPUs: {peers}")
        slow, budget = domain.budget()
        print(f"waits: reported after {slow:g} s, ended after {budget:g} s (0: never)")
    arch = domain.arch(platform, Mesh(np.array(devices), ("i",)))
    found, file = table(arch), table_file(arch)
    print(f"policy {found['arch']} for {arch}, Atom {found['atom']}:")
    print(f"  from {'your own' if is_own(file) else 'the package'}: {file}")
    for row in found["rows"]:
        ops = ", ".join(row.get("ops", ["all ops"]))
        print(f"  world {row['world']}, {ops} ({row['source']})")
        for band in row["bands"]:
            limit = band["up_to_bytes"]
            size = "any size" if limit is None else f"up to {limit} bytes a pair"
            atom = f", Atom {band['atom']}" if "atom" in band else ""
            print(f"    {size}: {band['regime']}, {band['blocks'] or 'as many'} blocks{atom}")
    return 0


def run_selftest(args: argparse.Namespace) -> int:
    """Every op in every regime, compared with jax.lax and timed beside it."""
    rows = selftest.run(_mesh(args))
    if jax.process_index() > 0:
        return int(any(not r["passed"] for r in rows))
    print(f"{'op':15}{'regime':23}{'dtype':9}{'items':>6}{'us':>10}{'times lax':>11}")
    for r in rows:
        verdict = "PASS" if r["passed"] else f"FAIL: {r['why']}"
        us = "-" if r["us"] is None else f"{r['us']:.1f}"
        ratio = "-" if r["times_lax"] is None else f"{r['times_lax']:.2f}"
        row = f"{r['op']:15}{r['regime']:23}{r['dtype']:9}{r['items']:6}{us:>10}{ratio:>11}"
        print(f"{row}  {verdict}")
    failed = sum(not r["passed"] for r in rows)
    print(f"{len(rows) - failed} passed, {failed} failed")
    return 1 if failed else 0


def run_bench(args: argparse.Namespace) -> int:
    """Time per step in jit beside jax.lax, and of kernels alone beside NCCL."""
    ops, sizes, against = _ops(args.ops, args.policy), args.sizes, args.against
    # First, since JAX takes most of the memory of a GPU when it is first asked for devices.
    kernels, about, missing = _kernels(ops, sizes, against, args)
    setup = bench.Setup(
        mesh=_mesh(args),
        dtype=args.dtype,
        policy=Policy(args.policy),
        samples=args.samples,
    )
    rows = bench.run(ops, sizes, [name for name in against if name != "nccl"], setup) + kernels
    if jax.process_index() > 0:
        return 0
    print(bench.table(rows))
    print(bench.LEGEND)
    if kernels:
        print(measure.against_nccl(rows))
    if args.json:
        report = {"header": measure.header(setup.samples, bench.STEP) | about, "rows": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        plots.figure(rows, args.plot)
    for cell in missing:
        print(f"MISSING {cell}", file=sys.stderr)
    return int(bool(missing))


def _ops(wanted: Sequence[str] | None, regime: str) -> list[str]:
    """The ops to time: those that are asked for, else all that have the regime."""
    fitting = [op for op in bench.OPS if regime == "auto" or op in _native.regimes[regime][0]]
    if unfit := [op for op in wanted or () if op not in fitting]:
        raise SystemExit(f"--policy {regime} is for {','.join(fitting)}, and not for {unfit[0]}")
    return list(wanted or fitting)


def _kernels(
    ops: Sequence[str], sizes: Sequence[int], against: Sequence[str], args: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """Rows of kernels alone, what a header says of them, and the cells that have none."""
    if args.native is None:
        if "nccl" in against:
            raise SystemExit(
                "nccl in --against needs --native DIR, the folder where kernel_time and nccl_time "
                "were built (cmake -DPURLIN_BENCH=ON -DPURLIN_MODULE=OFF, then ninja)"
            )
        return [], {}, []
    if args.platform == "cpu" or args.dtype != "float32":
        raise SystemExit("--native times float32 on GPUs alone")
    try:
        from benchmarks import kernels
    except ModuleNotFoundError as error:
        raise SystemExit("--native needs the repository: run this in its root") from error
    setup = kernels.Setup(args.native, Policy(args.policy), devices=args.devices)
    impls = ["purlin", *(["nccl"] if "nccl" in against else [])]
    found = kernels.run(ops, sizes, impls, setup)
    about = kernels.header(setup, impls) | {"missing": found.missing}
    return found.rows, about, found.missing


def run_tune(args: argparse.Namespace) -> int:
    """Measure, and write a policy table for these devices."""
    tune.run(_mesh(args), args.minutes, args.out)
    return 0


def _some_of(*known: str) -> Callable[[str], list[str]]:
    """A reader of names with commas between them."""

    def read(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"no {name!r}; take some of {','.join(known)}")
        return names

    return read


def _sizes(text: str) -> list[int]:
    try:
        return [bench.parse_size(size) for size in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _dtype(name: str) -> Any:
    try:
        return jax.numpy.dtype(name)
    except TypeError:
        raise argparse.ArgumentTypeError(f"no dtype {name!r}; take one as float32") from None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m purlin_jax")
    commands = parser.add_subparsers(required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--platform", choices=("cpu", "gpu"), help="default: what jax takes")
    common.add_argument("--devices", type=_positive, help="default: all (8 on the CPU)")
    joint = argparse.ArgumentParser(add_help=False)
    joint.add_argument("--processes", type=int, default=1, help="that share the devices")
    joint.add_argument("--member", help=argparse.SUPPRESS)
    common.set_defaults(processes=1)
    p = commands.add_parser("status", parents=[common], help="what is built and what is here")
    p.set_defaults(run=status)
    p = commands.add_parser("selftest", parents=[common, joint], help="compare with jax.lax")
    p.set_defaults(run=run_selftest)
    p = commands.add_parser("bench", parents=[common, joint], help="time inside jit, and alone")
    p.set_defaults(run=run_bench)
    names = ",".join(bench.OPS)
    p.add_argument("--ops", type=_some_of(*bench.OPS), help=f"default: {names}, as --policy allows")
    sizes = "1K,16K,64K,256K,1M"
    p.add_argument("--sizes", type=_sizes, default=sizes, help=f"bytes; default: {sizes}")
    p.add_argument("--dtype", type=_dtype, default="float32", help="default: float32")
    p.add_argument(
        "--against", type=_some_of("lax", "nccl"), default="lax", help="lax,nccl; empty for none"
    )
    p.add_argument("--native", type=Path, help="folder of kernel_time and nccl_time")
    p.add_argument("--policy", choices=REGIMES, default="auto", help="force a regime")
    p.add_argument("--samples", type=_positive, default=15, help="of each row; default: 15")
    p.add_argument("--json", type=Path, help="file to write the rows to")
    p.add_argument("--plot", type=Path, help="PNG of time and bandwidth; needs matplotlib")
    p = commands.add_parser("tune", parents=[common], help="write a policy for these devices")
    p.set_defaults(run=run_tune)
    p.add_argument("--minutes", type=float, default=5.0, help="to measure at most; default: 5")
    p.add_argument("--out", type=Path, help="file to write; default: where it is read from")
    args = parser.parse_args()
    with _single_devices():
        return _in_processes(args) if args.processes > 1 else args.run(args)


@contextmanager
def _single_devices() -> Iterator[None]:
    """Collectives of one device are calls too, to be measured and tested."""
    before = os.environ.get("PURLIN_SINGLE")
    os.environ["PURLIN_SINGLE"] = "call"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PURLIN_SINGLE"]
        else:
            os.environ["PURLIN_SINGLE"] = before


def _in_processes(args: argparse.Namespace) -> int:
    """Start the members of a job, or be one of them."""
    if args.platform is None:
        raise SystemExit("--processes needs --platform cpu or --platform gpu")
    if args.platform == "gpu" and domain.cuda is None:
        raise SystemExit("purlin_jax was built without CUDA")
    if not args.member:
        return together.run(sys.argv[1:], args.processes, args.platform, args.devices)
    together.join(args.member, args.platform)
    args.devices = None
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
