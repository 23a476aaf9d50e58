"""The measurements behind the README's speed table: `python -m benchmarks`.

Timings are never part of a timed test: tests/unit/test_benchmarks.py only looks at what comes out.
"""
