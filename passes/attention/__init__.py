"""Softmaxes, attentions, their masks, caches and heads."""
