"""Attention models to read and to optimize: `attngraph optimize --factory examples.NAME:build`.

Each `build()` returns (module, sample inputs, dynamic shapes) and is the same at every call.
"""
