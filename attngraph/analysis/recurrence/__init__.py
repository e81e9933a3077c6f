"""Loops over time: their steps, and the cells of RNNs, LSTMs and GRUs."""
