"""One ONNX form per op, in files by kind of op."""
