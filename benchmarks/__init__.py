"""The benchmarks of a checkout, which no wheel holds: `python -m benchmarks`."""
