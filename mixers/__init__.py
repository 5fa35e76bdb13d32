"""Token mixers: the contract they keep, the feature maps they share, and one file for each mixer."""
