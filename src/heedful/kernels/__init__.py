"""heedful's own kernels, one package a kind of machine."""
