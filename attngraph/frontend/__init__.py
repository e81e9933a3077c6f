"""From a model file or module to a Graph."""
