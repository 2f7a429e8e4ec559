"""Interpolation, grid sampling, pixel shuffle."""
