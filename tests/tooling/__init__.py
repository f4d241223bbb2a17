"""Proof that what surrounds the program (images, CI, units) is what the program takes."""
