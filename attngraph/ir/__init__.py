"""The typed SSA graph: values, nodes, the op table, text form, verifier and interpreter."""

from attngraph.ir.builder import Builder
from attngraph.ir.clone import clone
from attngraph.ir.dims import Dim, DimInfo
from attngraph.ir.graph import Graph, Node, Value
from attngraph.ir.interpreter import interpret
from attngraph.ir.loc import Loc
from attngraph.ir.parser import parse
from attngraph.ir.printer import format_graph
from attngraph.ir.remarks import Remark, remark_on
from attngraph.ir.types import ScalarType, TensorType, Type
from attngraph.ir.verifier import verify

__all__ = [
    "Builder",
    "Dim",
    "DimInfo",
    "Graph",
    "Loc",
    "Node",
    "Remark",
    "ScalarType",
    "TensorType",
    "Type",
    "Value",
    "clone",
    "format_graph",
    "interpret",
    "parse",
    "remark_on",
    "verify",
]
