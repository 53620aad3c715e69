"""The world's stand-in for torchft's lighthouse tells the quorums that torchft's own has told, as recorded.

`../adapters/test_torchft_lighthouse.py` plays the sequences to torchft's own again.
"""

from __future__ import annotations

import pytest
from lighthouse_sequences import StandIn, play, recorded

from fn.testing.world import quorum


def test_the_stand_in_tells_the_quorums_that_torchfts_lighthouse_told():
    for events, quorums in recorded():
        assert play(events, StandIn()) == quorums, events


def test_100_sequences_are_recorded_with_everything_that_may_happen():
    sequences = [events for events, _ in recorded()]
    assert len(sequences) == 100
    for what in ("join", "ask", "silent", "back", "leave", "restart"):
        assert sum(any(event.startswith(what) for event in events) for events in sequences) > 30
    sizes = [len(told.members) for _, quorums in recorded() for told in quorums]
    assert len(sizes) > 1000
    assert sum(size > 1 for size in sizes) > 500


@pytest.mark.parametrize(("name", "value"), [("JOIN", 0.0), ("HEARTBEAT", 2 * quorum.HEARTBEAT)])
def test_other_limits_would_be_seen(monkeypatch, name, value):
    monkeypatch.setattr(quorum, name, value)
    assert sum(play(events, StandIn()) != quorums for events, quorums in recorded()) > 30


def test_a_quorum_that_keeps_its_number_when_exchanges_fail_would_be_seen():
    without = [[f"{event[:-1]}0" if event.startswith("ask") else event for event in events] for events, _ in recorded()]
    numbers = [[told.number for told in quorums] for _, quorums in recorded()]
    assert [[told.number for told in play(events, StandIn())] for events in without] != numbers
