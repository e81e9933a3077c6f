"""How ops act on rows and on new axes (batching rules), and which rows are padding."""
