"""`convmesh selftest`: whether this library is right on the hardware at hand, and how fast its parts are there."""
