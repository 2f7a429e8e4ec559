"""Convolutional networks on a device mesh, with exactly the results of one device."""
