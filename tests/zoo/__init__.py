"""Networks of other people's packages, unmodified, in small configurations: `make zoo`, and some in `make test`."""
