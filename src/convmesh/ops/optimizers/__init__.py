"""Operators on lists of tensors, which optimizers, clipping and loss scaling are made of."""
