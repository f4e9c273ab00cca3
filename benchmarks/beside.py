"""Times purlin and jax.lax where a chain hides something, and jax.lax with its documented flags.

python -m benchmarks.beside [--flags default,scheduler] [--json FILE]

A single call from dispatch to result; a lax.scan with a real body; a collective beside products
that do not need it, which XLA can overlap with its own collectives alone. XLA reads its flags once,
so each set of them has a process of its own. "alone" is a step without its collective.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import common, situations
from purlin_jax import bench

_SCHEDULER = "--xla_gpu_enable_latency_hiding_scheduler=true"
# The scheduler is in JAX's "GPU performance tips" and the default of NVIDIA's images; the others
# are in the tips of JAX-Toolbox, except for symmetric buffers, which XLA calls experimental.
FLAGS = {
    "default": "",
    "sequential": "--xla_gpu_enable_latency_hiding_scheduler=false",
    "scheduler": _SCHEDULER,
    "priority": f"{_SCHEDULER} --xla_gpu_enable_highest_priority_async_stream=true",
    "graphs": f"{_SCHEDULER} --xla_gpu_enable_command_buffer=+COLLECTIVES",
    "no_graphs": f"{_SCHEDULER} --xla_gpu_enable_command_buffer=",
    "user_buffers": f"{_SCHEDULER} --xla_gpu_enable_nccl_user_buffers=true",
    "symmetric": f"{_SCHEDULER} --xla_gpu_enable_nccl_user_buffers=true "
    "--xla_gpu_experimental_enable_nccl_symmetric_buffers=true",
}
COLUMNS = (
    "situation", "op", "bytes", "flags", "impl", "us_median", "us_p10", "us_p90", "times_lax",
    "times_best_lax",
)  # fmt: skip


def child(args: argparse.Namespace) -> int:
    """Measure everything under the flags that this process was started with."""
    mesh = common.mesh(args)
    sizes = situations.Sizes(args.scan_steps, args.overlap_steps, args.overlap_width, args.samples)
    rows: list[common.Row] = []
    for op in args.ops:
        for nbytes in args.sizes:
            rows += situations.measured(args.situations, op, nbytes, sizes, mesh)
            args.child.write_text(json.dumps(rows))  # so that a later failure leaves these
    return 0


def under(name: str, timeout: float) -> list[common.Row]:
    """The rows of this program in a process with a set of flags; one that says why, if it fails."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS[name]}".strip()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        command = [sys.executable, "-m", "benchmarks.beside", *sys.argv[1:], "--child", str(out)]
        why = ""
        try:
            done = subprocess.run(
                command,
                cwd=Path(__file__).parents[1],
                env={**os.environ, "XLA_FLAGS": flags},
                stderr=subprocess.PIPE,
                text=True,
                timeout=timeout,
            )
            if done.returncode:
                lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
                # XLA ends the process over a flag that this version does not know.
                why = next((line for line in lines if "nknown flag" in line), lines[-1])
        except subprocess.TimeoutExpired:
            why = f"took more than {timeout:g} s"
        rows = json.loads(out.read_text()) if out.exists() else []
    if why:
        rows.append(_nothing(why[:300]))
    return [{"flags": name, "xla_flags": flags, **row} for row in rows]


def _nothing(why: str) -> common.Row:
    """A row without figures. That XLA no longer knows a flag is a finding, and no fault."""
    return {"note" if "nknown flag" in why else "refused": why}


def against_best(rows: list[common.Row]) -> None:
    """Add to purlin's rows with default flags how they compare with jax.lax under any flags."""
    for row in rows:
        if row.get("impl") != "purlin" or row["flags"] != "default" or "us_median" not in row:
            continue
        same = ("situation", "op", "bytes")
        lax = [
            r["us_median"]
            for r in rows
            if r.get("impl") == "lax" and "us_median" in r and all(r[k] == row[k] for k in same)
        ]
        row["times_best_lax"] = round(min(lax) / row["us_median"], 3) if lax else None


def main() -> int:
    words = lambda text: text.split(",")  # noqa: E731
    parser = common.parser(__doc__)
    parser.add_argument("--flags", type=words, default=list(FLAGS), help=", ".join(FLAGS))
    parser.add_argument("--situations", type=words, default=list(situations.SITUATIONS))
    parser.add_argument("--ops", type=words, default=list(situations.OPS))
    sizes = [bench.parse_size(s) for s in ("64K", "1M", "16M")]
    parser.add_argument(
        "--sizes", type=lambda s: [bench.parse_size(n) for n in words(s)], default=sizes
    )
    parser.add_argument("--scan-steps", type=int, default=200)
    parser.add_argument("--overlap-steps", type=int, default=20)
    parser.add_argument("--overlap-width", type=int, default=2048, help="of the square products")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a set of flags")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.flags) - FLAGS.keys():
        parser.error(f"no flags {sorted(unknown)}; take some of {', '.join(FLAGS)}")
    if args.child:
        return child(args)
    rows = [row for name in args.flags for row in under(name, args.timeout)]
    against_best(rows)
    order = {name: i for i, name in enumerate(args.flags)}
    rows.sort(
        key=lambda r: (
            r.get("situation", "~"), r.get("op", ""), r.get("bytes", 0), order[r["flags"]]
        )
    )  # fmt: skip
    step = (
        f"call: one program with one collective, waited for; scan: a layer of {args.scan_steps}; "
        f"overlap: a step of {args.overlap_steps}, with two products of {args.overlap_width}"
    )
    return common.report(rows, COLUMNS, step, args)


if __name__ == "__main__":
    sys.exit(main())
