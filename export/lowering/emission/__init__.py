"""What every lowering stands on: the ONNX graph under construction, sizes, trusted kernels."""
