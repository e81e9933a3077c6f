"""Graph passes: analyses and rewrites, one per file."""
