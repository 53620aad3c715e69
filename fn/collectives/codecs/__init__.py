"""Codecs: what a vector looks like on the wire."""
