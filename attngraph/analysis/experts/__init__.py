"""Mixtures of experts: what their products, activations and routers are, however dispatched."""
