"""`convmesh selftest`: checks that results are exact on the hardware at hand, and measures how fast its parts are."""
