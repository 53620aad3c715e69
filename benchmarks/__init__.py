"""Measurements of fn, a script each: `python -m benchmarks.steps.step`. `benchmarks/README.md` reports them."""
