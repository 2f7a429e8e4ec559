"""Reshaping, permuting, slicing, joining, padding, flipping."""
