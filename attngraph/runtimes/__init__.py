"""What other runtimes read beside an ONNX file."""
