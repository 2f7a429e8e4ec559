"""Failing communication: every collective is intercepted, and the error names its ranks and the place in the code."""
