"""How ops act on rows, and which rows are padding."""
