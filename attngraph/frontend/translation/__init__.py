"""From torch's graph to the IR."""
