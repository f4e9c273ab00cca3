"""Programs that measure; each runs with `python -m benchmarks.NAME`."""
