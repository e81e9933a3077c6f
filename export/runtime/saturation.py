"""Whether this machine's product of u8 and s8 adds two neighbours in 16 bits, which saturate.

x86 CPUs without VNNI do so. The kernel itself is asked, so no table of CPUs can be out of date.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy
import onnx_ir as ir
import onnxruntime

from attngraph.errors import LoadError, ProviderError
from attngraph.metadata import json_object

ROUNDING_KEY = "attngraph.activations"
"""The key in a file's metadata that says how it rounds activations."""
_WIDTH = 64
_ROWS = (1, 16)  # which kernels may tell apart


@functools.cache
def saturates() -> bool:
    """Whether MatMulIntegerToFloat is wrong where codes are as large as they may be."""
    codes = numpy.full((_WIDTH, _WIDTH), 127, numpy.int8)
    x = ir.val("x", ir.DataType.UINT8, ["rows", _WIDTH])
    y = ir.val("y", ir.DataType.FLOAT, ["rows", _WIDTH])
    held = [
        ir.Value(name=name, const_value=ir.tensor(data, name=name))
        for name, data in (("codes", codes), ("one", numpy.array(1.0, numpy.float32)))
    ]
    product = ir.Node(
        "com.microsoft", "MatMulIntegerToFloat", [x, held[0], held[1], held[1]], outputs=[y]
    )
    opsets = {"": 21, "com.microsoft": 1}
    graph = ir.Graph([x], [y], nodes=[product], initializers=held, opset_imports=opsets)
    session = onnxruntime.InferenceSession(
        ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString(),
        providers=["CPUExecutionProvider"],
    )
    for rows in _ROWS:
        (found,) = session.run(None, {"x": numpy.full((rows, _WIDTH), 255, numpy.uint8)})
        if not (found == 255.0 * 127 * _WIDTH).all():
            return True
    return False


def require_exact(metadata: Mapping[str, str]) -> None:
    """Raises ProviderError for a file whose codes are too large for this machine's products.

    Raises LoadError where it says of them what no compile writes.
    """
    said = metadata.get(ROUNDING_KEY)
    if said is None:
        return
    try:
        narrow = json_object(said).get("narrow", True)
    except ValueError as error:
        raise LoadError(
            f"What the file says of its int8 products can't be read ({error}): it was changed "
            "since it was compiled. Optimize the model again."
        ) from error
    if narrow or not saturates():
        return
    raise ProviderError(
        "The file's int8 products would overflow on this CPU, which adds pairs of them in 16 bits "
        "(it has no VNNI), and it was compiled on one that doesn't: compile the model here."
    )
