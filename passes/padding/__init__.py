"""Rows that are padding are left out."""
