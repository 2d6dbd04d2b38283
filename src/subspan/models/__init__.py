"""Networks that mix through a bottleneck."""
