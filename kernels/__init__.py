"""Operations: one folder each, with a plain reference, the fast implementation behind a torch.library op, and the public functions."""
