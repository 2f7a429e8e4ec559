"""Operators on lists of tensors, which optimizers, gradient clipping and loss scaling use."""
