"""`enable(check=True)`: before each collective, ranks compare what they are about to do."""
