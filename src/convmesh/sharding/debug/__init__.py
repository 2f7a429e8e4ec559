"""`enable(check=True)`: ranks compare what they are about to do before each communication."""
