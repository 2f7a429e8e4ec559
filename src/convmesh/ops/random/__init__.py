"""Random operators, which draw the same numbers as one device."""
