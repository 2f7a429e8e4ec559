"""What the pages of `convmesh plan`, `demo` and `selftest` are made of: charts, shards with halos, words, templates."""
