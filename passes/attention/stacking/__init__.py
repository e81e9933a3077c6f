"""Heads written one by one, made as one."""
