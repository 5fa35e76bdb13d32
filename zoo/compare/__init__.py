"""`zoo compare`: the same work for several architectures, eager and compiled, in one run."""
