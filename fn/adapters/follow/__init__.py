"""Followers: a run is a log of codes, and whoever reads it has the same parameters after every step."""
