"""heedful: choose an attention backend and say why, run it, prove it."""
