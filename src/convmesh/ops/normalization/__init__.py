"""Batch, group, instance, layer, RMS and weight norm."""
