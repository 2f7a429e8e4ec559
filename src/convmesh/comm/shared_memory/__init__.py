"""The transport between CPU ranks of one machine: all-to-all through shared memory."""
