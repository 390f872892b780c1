"""The mathematics of two gradients: imports torch alone."""
