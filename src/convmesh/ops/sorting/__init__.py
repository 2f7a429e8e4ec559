"""Sorting, top-k, quantiles, searchsorted."""
