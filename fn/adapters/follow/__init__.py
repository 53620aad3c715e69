"""Followers: a run is a log of codes, and whoever reads it has the same parameters after every step."""

from fn.adapters.follow.follower import Diverged, Follower
from fn.adapters.follow.publish import Publication, publish

__all__ = ["Diverged", "Follower", "Publication", "publish"]
