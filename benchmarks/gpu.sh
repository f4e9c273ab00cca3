#!/usr/bin/env bash
# Everything that is measured and tested on GPUs, in one go: tests, kernel times, jit times.
#
#   benchmarks/gpu.sh OUTPUT_FOLDER
#
# Needs an installed purlin_jax with its CUDA side, nvcc, NCCL as jax[cuda13] brings it, and
# matplotlib. About 45 minutes on two H200s, most of them compilation of programs, the long runs of
# tests/gpu/test_beside_lax.py and the sweep of Atoms.
set -euo pipefail
export PURLIN_SINGLE=call # a single GPU is measured too
out=$(realpath "${1:?usage: benchmarks/gpu.sh OUTPUT_FOLDER}")
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

cmake -S . -B "$build" -G Ninja -DPURLIN_MODULE=OFF -DPURLIN_TESTS=ON -DPURLIN_BENCH=ON \
  -DCMAKE_CUDA_ARCHITECTURES=native -DPython_EXECUTABLE="$(command -v "$python")" \
  >"$out/build.log" 2>&1
ninja -C "$build" >>"$out/build.log" 2>&1

failed=0
"$build/cuda_folds" 4001 | tee "$out/folds.log" || failed=1
for atom in generic ampere hopper; do
  for ranks in "2 4 128 300" "3 3 96 300" "5 2 64 200" "8 2 512 200" "16 1 64 100"; do
    "$build/cuda_ranks" $atom $ranks | tee -a "$out/ranks.log" || failed=1
  done
done
"$python" -m pytest -q tests/gpu 2>&1 | tee "$out/tests.log" || failed=1

# Kernels alone beside NCCL and jit beside jax.lax, every cell in one file. With one GPU there is
# nothing of either to compare with: XLA leaves its own collectives out.
against=$("$python" -c 'import jax; print("lax,nccl" if len(jax.devices()) > 1 else "")')
sizes=1K,4K,16K,64K,256K,1M,4M,16M,64M,256M,1G
"$python" -m purlin_jax bench --against "$against" --native "$build" --sizes $sizes \
  --json "$out/bench.json" 2>&1 | tee "$out/bench.log" || failed=1
# The same with a process for each GPU.
gpus=$("$python" -c 'import jax; print(len(jax.devices()))')
if [ "$gpus" -gt 1 ]; then
  "$python" -m purlin_jax selftest --platform gpu --processes "$gpus" 2>&1 \
    | tee "$out/selftest_processes.log" || failed=1
  "$python" -m purlin_jax bench --platform gpu --processes "$gpus" --against "" --sizes $sizes \
    --json "$out/bench_processes.json" 2>&1 | tee "$out/bench_processes.log" || failed=1
fi
"$python" -m purlin_jax.plots "$out/bench.json" || failed=1
"$python" -m benchmarks.atom_sweep --build "$build" --json "$out/atoms.json" \
  --plot "$out/atoms.png" 2>&1 | tee "$out/atoms.log" || failed=1

"$python" -m benchmarks.varlen --sizes 1K,16K,256K,4M,64M,256M --json "$out/varlen.json" 2>&1 \
  | tee "$out/varlen.log" || failed=1

# What users feel: the exchange, whole blocks, and what a chain hides. Flags are for jax.lax.
flags=default${against:+,scheduler,graphs,user_buffers,symmetric}
"$python" -m benchmarks.ulysses_exchange --json "$out/ulysses.json" 2>&1 \
  | tee "$out/ulysses.log" || failed=1
"$python" -m benchmarks.mmdit_block --json "$out/mmdit.json" 2>&1 | tee "$out/mmdit.log" || failed=1
"$python" -m benchmarks.beside --flags "$flags" --sizes 64K,16M --json "$out/beside.json" 2>&1 \
  | tee "$out/beside.log" || failed=1
exit $failed
