"""Attention in ONNX: one file per form, and what the forms share."""
