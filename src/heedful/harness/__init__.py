"""The host side: the matrix of platforms and, later, the images and containers that prove it. Never loads torch."""
