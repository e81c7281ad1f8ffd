"""The benchmarks of `python -m podrl.bench`."""
