"""Benchmarks: each prints a table and writes JSON with the machine, versions and command."""
