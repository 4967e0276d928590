"""Layer 1: engine directory to tokens."""
