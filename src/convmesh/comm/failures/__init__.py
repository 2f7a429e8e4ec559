"""Communications that fail: every one is intercepted, and the error says between whom and where."""
