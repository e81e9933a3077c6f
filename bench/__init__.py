"""Benchmarks: measured on a quiet machine, never run as tests."""
