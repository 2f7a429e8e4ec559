"""A script that ends when it is imported."""

raise SystemExit(3)
