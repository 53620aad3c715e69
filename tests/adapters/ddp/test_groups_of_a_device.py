"""What differs where process groups and streams are a device's; without one, asked of what stands in for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn

import fn
from fn.adapters import ddp
from fn.adapters.ddp import data_parallel
from fn.adapters.fsdp import comms as fsdp_comms
from fn.collectives import comm_thread as communication_thread


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(("backend", "groups"), [("gloo", 3), ("nccl", 1)])
def test_several_groups_communicate_at_a_time_only_where_none_runs_on_the_device(alone, backend, groups, monkeypatch):
    """torch.distributed.new_group: groups of NCCL need "a globally consistent execution order across ranks"."""
    made: list[Any] = []
    monkeypatch.setattr(data_parallel, "bind_twin", lambda axis, group: made.append(group) or fn.bind({axis: group}))
    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda *_: SimpleNamespace(name=lambda: backend))
    model = nn.Linear(3, 2)
    with fn.bind({"data": alone}):
        opt = fn.Optimizer(model.parameters(), lambda lr: fn.onebit_adam(lr, axis="data"), schedule=fn.freeze_after(9))
    found = ddp.overlap(model, opt)
    assert len(made) == len(found._threads) == groups


class Lent:
    """A tensor of a device, as far as it is looked at."""

    device = torch.device("cuda", 1)

    def __init__(self) -> None:
        self.streams: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)

    def split(self, widths: Any) -> Any:
        raise InterruptedError("what follows is done with numbers")


def interrupted(*_: Any, **__: Any) -> Any:
    raise InterruptedError


def test_gradients_stay_in_memory_until_the_replicas_stream_is_done_with_them(alone, monkeypatch):
    """FSDP2 frees what it hands to the hook before that stream has read it, where it casts it afterwards."""
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"current on {device}")
    own = fn.collectives.codecs.codec.Segments((8,), torch.tensor([[8]]))
    like, reduced = torch.zeros(1), Lent()
    mean = fsdp_comms.ReplicaMean("block", "replicas", alone, own, fn.sign(), fn.classic(), like, fn.ledger(), dict)
    mean._shards = None
    with pytest.raises(InterruptedError):
        mean(reduced)
    assert reduced.streams == ["current on cuda:1"]


def test_errors_stay_in_memory_until_the_stream_of_the_messages_is_done_with_them(alone, monkeypatch):
    """They are made on the stream of the user's code; the first backward pass reads and replaces them on FSDP2's."""
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"current on {device}")
    own = fn.collectives.codecs.codec.Segments((8,), torch.tensor([[8]]))
    like, sent, op = torch.zeros(1), fn.ledger(), dist.ReduceOp.AVG
    scatter = fsdp_comms.CompressedReduceScatter("block", "shard", alone, own, fn.sign(), fn.classic(), like, sent)
    mean = fsdp_comms.ReplicaMean("block", "replicas", alone, own, fn.sign(), fn.classic(), like, sent, dict)
    monkeypatch.setattr(fsdp_comms, "bind", interrupted)
    scatter.error = (Lent(), Lent())
    with pytest.raises(InterruptedError):
        scatter(torch.zeros(8), torch.zeros(8), alone, op)
    assert [x.streams for x in scatter.error] == [["current on cuda:1"]] * 2
    mean.state, mean._shards, reduced = (Lent(), [Lent()]), None, Lent()
    with pytest.raises(InterruptedError):
        mean(reduced)
    assert [x.streams for x in (mean.state[0], *mean.state[1], reduced)] == [["current on cuda:1"]] * 3


def test_a_group_for_another_thread_is_made_without_the_ranks_that_are_not_in_it(alone, monkeypatch):
    """With `device_id` torch splits communicators off the world's, which waits for all of its ranks."""
    split, world = [], dist.group.WORLD
    monkeypatch.setattr(c10d, "_get_split_source", lambda group: split.append(group))
    world.bound_device_id = torch.device("cuda", 0)
    try:
        twin = communication_thread.bind_twin("data", world)
        assert world.bound_device_id == torch.device("cuda", 0)
        monkeypatch.setattr(dist, "new_group", interrupted)
        with pytest.raises(InterruptedError):
            communication_thread.bind_twin("data", world)
        assert world.bound_device_id == torch.device("cuda", 0)
    finally:
        world.bound_device_id = None
    assert split == []
    with twin:
        assert fn.pmean(torch.ones(3), "data").tolist() == [1.0] * 3
