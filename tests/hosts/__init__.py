"""Hosts of their own on one machine, with a network between them: `make hosts`."""
