"""Simulation of many ranks in one process: threads that take turns, each as if it were a process."""

from .run import simulate as simulate
