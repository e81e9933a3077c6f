"""Where each element of a tensor comes from: axes, contractions, index maps, columns."""
