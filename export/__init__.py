"""Lowering to ONNX, sessions and parity."""
