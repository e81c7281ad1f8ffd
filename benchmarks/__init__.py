"""The benchmarks, `python -m benchmarks`; only a checkout has them, because wheels leave them out."""
