"""All-to-all between CPU ranks of one machine through shared memory."""
