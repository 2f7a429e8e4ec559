"""Linear layers, matrix products, attention, embeddings, Fourier transforms."""
