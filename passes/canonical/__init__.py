"""Canonical forms, dead and common code, constants, layouts."""
