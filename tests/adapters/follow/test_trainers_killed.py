"""Trainers that are killed at any moment, and go on from their checkpoint: a follower ends where they end."""

from __future__ import annotations

import contextlib
import os
import random

import pytest
import torch
import torch.distributed as dist
from published_methods import ALL, NAN, agreed, follower, model, optimizer
from ranks import LIMIT, server

import fn
from fn.adapters.checkpoint import load, save
from fn.adapters.follow import publish

LIVES, STEPS_PER_SAVE = 20, 6


def train(name, folder, life, rank, last, told):
    """Train from the newest checkpoint to the last step, or until somebody kills this process; tell each step."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store {life}"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    case, net = ALL[name], model()
    with fn.bind({"data": dist.group.WORLD}):
        opt = optimizer(net, case)
    with contextlib.suppress(FileNotFoundError):
        net.load_state_dict(load(folder / "checkpoints", opt, net.state_dict()))
    published = publish(opt, folder / "log", snapshot_every=16, digest_every=4)
    tell = told.send if rank == 0 else lambda message: None
    tell((opt.steps, None))
    for step in range(opt.steps, last):
        opt.zero_grad()
        # In each life other data: what an earlier one did is no good for a later one.
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + 2 * life + rank))
        if step % 20 == NAN and rank == 1:
            x[0, 0] = torch.nan
        opt.param_groups[0]["lr"] = case.lr / (1 + step // 30)
        (net(x) - x[:, :4].sin()).square().mean().backward()
        opt.step()
        tell((step, agreed(opt).numpy()))
        if (step + 1) % STEPS_PER_SAVE == 0:
            save(folder / "checkpoints", opt, net.state_dict())
    if published is not None:
        published.close()
    dist.barrier()
    told.close()
    os._exit(0)


def begun(name, folder, life, last):
    """Start two trainers; return them, and where rank 0 tells its steps."""
    processes, ends = [], []
    for rank in range(2):
        ours, theirs = server().Pipe(duplex=False)
        process = server().Process(target=train, args=(name, folder, life, rank, last, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(ours)
    return processes, ends


class Watcher:
    """Compares a follower with what trainers told. truth: the params behind each step that counts."""

    def __init__(self, name):
        self.name, self.truth, self.mine, self.compared = name, {}, None, 0

    def hear(self, end):
        """Take what a trainer tells; return its step, or None behind the last one."""
        assert end.poll(LIMIT)
        try:
            step, params = end.recv()
        except (EOFError, OSError):  # it ended, perhaps in the middle of a message
            return None
        if params is None:  # it begins from here, and takes again what came later
            self.truth = {s: x for s, x in self.truth.items() if s < step}
        else:
            self.truth[step] = torch.from_numpy(params)
        return step

    def follow(self, folder):
        if self.mine is None:
            _, self.mine = follower(folder / "log", ALL[self.name])
        for step in self.mine:
            if step in self.truth:  # what is in the log may not be told yet
                self.compared += 1
                assert torch.equal(agreed(self.mine.optimizer), self.truth[step]), step


@pytest.mark.reliability
@pytest.mark.parametrize("name", ["onebit_adam", "muon, int8", "diloco, streaming", "adamw, late"])
def test_killed_at_random_moments_and_restarted(name, tmp_path):
    moments, watcher, restarts = random.Random(name), Watcher(name), []
    for life in range(LIVES):
        processes, (told, other) = begun(name, tmp_path, life, 10**6)
        restarts.append(watcher.hear(told))
        for _ in range(moments.randrange(1, 16)):
            watcher.hear(told)
            if moments.random() < 0.2:
                watcher.follow(tmp_path)
        for process in moments.sample(processes, 2):
            process.kill()
        while watcher.hear(told) is not None:  # told before the end, or the half of it
            pass
        for process in processes:
            process.join()
        told.close()
        other.close()
        watcher.follow(tmp_path)
    last = max(watcher.truth) + 30
    processes, (told, _) = begun(name, tmp_path, LIVES, last)
    while watcher.hear(told) is not None:
        pass
    for process in processes:
        process.join(LIMIT)
        assert process.exitcode == 0
    watcher.follow(tmp_path)
    end = watcher.truth[last - 1]
    assert watcher.mine.steps == last
    assert torch.equal(agreed(watcher.mine.optimizer), end)
    assert restarts == sorted(restarts)
    assert len({*restarts}) > 5
    assert watcher.compared > 50
    _, late = follower(tmp_path / "log", ALL[name])
    late.to(last - 1)  # from the newest snapshot
    assert torch.equal(agreed(late.optimizer), end)
    _, again = follower(tmp_path / "log", ALL[name])
    for step in again:
        assert step not in watcher.truth or torch.equal(agreed(again.optimizer), watcher.truth[step]), step
    assert again.steps == last
