"""Parity with the eager model: the inputs it is checked on, and what these exercise."""
