"""Benchmarks: each runs alone (``python -m benchmarks.<name>``) and prints its figures."""
