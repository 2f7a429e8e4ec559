"""Random operators, which draw the numbers of one device."""
