"""onnxruntime: sessions, their options and providers, and the times of kernels on this machine."""
