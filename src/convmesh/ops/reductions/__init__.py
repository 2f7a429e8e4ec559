"""Reductions, scans, softmax, histograms."""
