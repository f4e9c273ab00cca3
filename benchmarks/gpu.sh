#!/usr/bin/env bash
# Everything that is measured and tested on GPUs, in one go: tests, kernel times, jit times.
#
#   benchmarks/gpu.sh OUTPUT_FOLDER
#
# Needs an installed purlin_jax with its CUDA side, and nvcc. About 25 minutes on two
# H200s, most of them compilation and the long runs of tests/gpu/test_beside_lax.py.
set -euo pipefail
out=$(realpath "${1:?usage: benchmarks/gpu.sh OUTPUT_FOLDER}")
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

cmake -S . -B "$build" -G Ninja -DPURLIN_MODULE=OFF -DPURLIN_TESTS=ON -DPURLIN_BENCH=ON \
  -DCMAKE_CUDA_ARCHITECTURES=native >"$out/build.log" 2>&1
ninja -C "$build" cuda_ranks kernel_time >>"$out/build.log" 2>&1

failed=0
for ranks in "2 4 128 300" "3 3 96 300" "5 2 64 200" "8 2 128 200" "16 1 64 100"; do
  "$build/cuda_ranks" $ranks | tee -a "$out/ranks.log" || failed=1
done
"$python" -m pytest -q tests/gpu 2>&1 | tee "$out/tests.log" || failed=1

for op in all_reduce all_to_all all_gather reduce_scatter; do
  "$build/kernel_time" $op packet 1 128 1024
  "$build/kernel_time" $op packet 1 512 1024 4096
  "$build/kernel_time" $op packet 4 512 16384
  "$build/kernel_time" $op packet 16 512 65536
  "$build/kernel_time" $op packet 64 512 262144 1048576
  "$build/kernel_time" $op zero_staging 32 512 1024 262144 1048576 16777216 268435456
done 2>&1 | tee "$out/kernels.log"

# With one GPU, XLA leaves nothing of jax.lax's collectives to compare with.
against=$("$python" -c 'import jax; print("lax" if len(jax.devices()) > 1 else "")')
"$python" -m purlin_jax bench --against "$against" --sizes 1K,4K,16K,64K,256K,1M,16M --json "$out/bench.json" \
  2>&1 | tee "$out/bench.log"

# What users feel: the exchange, whole blocks, and what a chain hides. Flags are for jax.lax.
flags=default${against:+,scheduler,graphs,user_buffers,symmetric}
"$python" -m benchmarks.ulysses_exchange --json "$out/ulysses.json" 2>&1 \
  | tee "$out/ulysses.log" || failed=1
"$python" -m benchmarks.mmdit_block --json "$out/mmdit.json" 2>&1 | tee "$out/mmdit.log" || failed=1
"$python" -m benchmarks.beside --flags "$flags" --sizes 64K,16M --json "$out/beside.json" 2>&1 \
  | tee "$out/beside.log" || failed=1
exit $failed
