"""A package that brings one attention backend to heedful; importing it loads nothing."""
