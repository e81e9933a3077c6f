"""The `attn` dialect: ops with a reference in plain torch. Importing registers them."""

from attngraph.dialect import attention, norms

__all__ = ["attention", "norms"]
