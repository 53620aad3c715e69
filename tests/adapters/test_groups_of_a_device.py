"""What differs where process groups and streams are a device's; without one, asked of what stands in for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fn
from fn.adapters import checkpoint_state, ddp, fsdp_comms


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(("backend", "groups"), [("gloo", 3), ("nccl", 1)])
def test_several_groups_communicate_at_a_time_only_where_none_runs_on_the_device(alone, backend, groups, monkeypatch):
    """torch.distributed.new_group: groups of NCCL need "a globally consistent execution order across ranks"."""
    made: list[Any] = []
    monkeypatch.setattr(ddp, "bind_twin", lambda axis, group: made.append(group) or fn.bind({axis: group}))
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


def test_gradients_stay_in_memory_until_the_replicas_stream_is_done_with_them(alone, monkeypatch):
    """FSDP2 frees what it hands to the hook before that stream has read it, where it casts it afterwards."""
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"current on {device}")
    own = fn.collectives.segments.Segments((8,), torch.tensor([[8]]))
    like, reduced = torch.zeros(1), Lent()
    mean = fsdp_comms.ReplicaMean("block", "replicas", alone, own, fn.sign(), fn.classic(), like, fn.ledger(), dict)
    mean._shards = None
    with pytest.raises(InterruptedError):
        mean(reduced)
    assert reduced.streams == ["current on cuda:1"]


def test_what_was_read_from_a_checkpoint_is_added_up_on_the_device_of_the_parameters(monkeypatch):
    """A group of NCCL has no backend for the CPU, where torch.distributed.checkpoint reads."""
    summed: list[torch.device] = []

    def psum(x: torch.Tensor, axis: str) -> torch.Tensor:
        summed.append(x.device)
        return torch.full(x.shape, 6.0, dtype=x.dtype)  # of both ranks

    monkeypatch.setattr(checkpoint_state, "psum", psum)
    monkeypatch.setattr(checkpoint_state, "device_among", lambda groups: torch.device("meta"), raising=False)
    opt = fn.Optimizer([torch.nn.Parameter(torch.zeros(3))], fn.adamw)
    states = {path: leaf for path, leaf in opt.state_dict().items() if path.startswith("state.")}
    opt._axes, opt._binding = ["data"], fn.collectives.axis.Binding({})
    rows = checkpoint_state.Rows(torch.ones(1, 3), 0, 2)
    found = checkpoint_state.moved(opt, {**states, "params.0.0": rows})
    assert found["params.0.0"].tolist() == [3.0] * 3
    assert summed == [torch.device("meta")]
