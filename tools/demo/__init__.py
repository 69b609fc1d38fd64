"""Models to try the product with."""
