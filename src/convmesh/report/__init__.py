"""Building blocks of the pages of `convmesh plan`, `demo` and `selftest`: charts, shards, words, templates."""
