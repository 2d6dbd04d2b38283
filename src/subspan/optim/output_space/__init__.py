"""Training on losses without a useful gradient: noise on the outputs, their losses, one ordinary backward pass."""
