"""Data: text, the token blocks it is cut into, and the order in which ranks see them."""
