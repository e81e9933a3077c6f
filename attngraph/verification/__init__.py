"""Parity of a file on the disk, whoever wrote it."""
