"""Shared by several operator families: tiles of windowed operators, copies by index maps, index bounds."""
