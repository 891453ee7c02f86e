"""Data sets, planted errors and methods of `benchmarks/audit.py`."""
