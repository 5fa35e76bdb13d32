"""Operations, one folder each: a plain reference, the fast form behind a torch.library op, the public functions."""
