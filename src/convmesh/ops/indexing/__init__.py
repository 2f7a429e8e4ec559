"""Reading and writing where indices or masks say."""
