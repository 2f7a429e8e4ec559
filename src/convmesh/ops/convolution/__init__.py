"""Convolution and its gradients, and im2col."""
