"""Benchmarks: python -m benchmarks.<name>. Each prints its rows as a table and appends them with --save."""
