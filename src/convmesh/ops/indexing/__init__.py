"""Reading and writing with indices and masks."""
