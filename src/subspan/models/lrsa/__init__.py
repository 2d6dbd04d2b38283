"""Low-rank spatial attention."""
