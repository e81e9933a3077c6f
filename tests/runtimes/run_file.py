"""Runs an ONNX file on inputs from an .npz, in whichever onnxruntime this process finds."""

from __future__ import annotations

import sys

import numpy
import onnxruntime


def main(path: str, given: str, found: str) -> None:
    """Writes every output, and the version that computed it, as an .npz."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    with numpy.load(given) as feeds:
        results = session.run(None, dict(feeds))
    named = zip([output.name for output in session.get_outputs()], results, strict=True)
    numpy.savez(found, version=onnxruntime.__version__, **dict(named))


if __name__ == "__main__":
    main(*sys.argv[1:])
