"""Elementwise operators, expand and fill."""
