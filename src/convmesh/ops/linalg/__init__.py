"""Linear and recurrent layers, matrix products, attention, embeddings, Fourier transforms."""
