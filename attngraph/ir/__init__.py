"""The typed SSA graph."""
