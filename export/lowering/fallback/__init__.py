"""Ops without a lowering of their own: torchlib, decompositions and formulas."""
