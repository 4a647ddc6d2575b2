"""Training of drafters: text written by the target, losses, one trainer for every method."""
