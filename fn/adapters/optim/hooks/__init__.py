"""Hooks that watch an optimizer: comparisons between ranks, and warnings. None of it is part of a step."""
