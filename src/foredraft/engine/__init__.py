"""The engine: sequences, scheduling, sampling and acceptance."""
