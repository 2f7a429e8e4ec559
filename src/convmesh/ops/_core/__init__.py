"""What several families share: tiles of windowed operators, copies by index maps, bounds of indices."""
