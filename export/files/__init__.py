"""Model files on the disk: written whole or not at all, weights beside them written once."""
