"""The eager module's own outputs, what of them is rounding, and the error budget."""
