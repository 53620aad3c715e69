"""Checkpoints: bit for bit on the same world, the undelivered mean on another, and never anything but old or new."""

from __future__ import annotations

import functools
import io
import logging
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from registry import OPTIMIZERS
from test_transactions import SHAPES, bits, build, phases_until, same, set_gradients
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase, tree
from fn.adapters import checkpoint
from fn.adapters.checkpoint import storage
from fn.collectives.transports.tcp import timeout_of
from fn.errors import CheckpointDamaged

# The same world.


@pytest.mark.parametrize(
    "error",
    [
        fn.PeerLost("a", rank=1, axis="data", lost=(2,)),
        fn.RanksDrifted("b", rank=1, field="c", step=3, since=2),
        CheckpointDamaged("d", file="e"),
    ],
)
def test_errors_travel_between_processes_with_what_they_say(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def continued(folder: str, name: str, phase: Phase) -> list[str]:
    """Save before a step of a phase, go on, load into another optimizer, go on; return what differs."""
    asked = [*phases_until(phase)[:3], *[phase] * 2, *phases_until(phase)[-1:] * 2]
    params, opt = build(name, 2, asked.__getitem__)
    for t in range(3):
        set_gradients(params, t)
        opt.step()
    extra = {"seen": torch.tensor(7), "deep": [torch.arange(3.0)]}
    checkpoint.save(f"{folder}/{name}-{phase.value}", opt, extra)
    others, again = build(name, 2, asked.__getitem__)
    for p in others:
        p.data.normal_()
    set_gradients(others, 50)
    again.step()  # a state that is nowhere near
    found = checkpoint.load(f"{folder}/{name}-{phase.value}", again, tree.map(torch.zeros_like, extra))
    wrong = [] if same(bits(found), bits(extra)) else ["extra differs"]
    for t in range(3, len(asked)):
        if not same(bits((params, opt.states)), bits((others, again.states))) or opt.phase is not again.phase:
            wrong.append(f"before step {t} it differs")
        for own, o in ((params, opt), (others, again)):
            set_gradients(own, t)
            o.step()
    return wrong


OF_EACH_KIND = ("onebit_adam", "muon, int8", "zero_one_adam", "loco_adamw")
CASES = tuple((o.name, phase) for o in OPTIMIZERS if o.name in OF_EACH_KIND for phase in o.phases)


def all_continued(folder: str) -> dict[tuple, list[str]]:
    return {case: continued(folder, *case) for case in CASES}


@functools.cache
def continuations(folder: str) -> list[dict[tuple, list[str]]]:
    return ranks.run(2, all_continued, folder)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "phase"), CASES)
def test_the_same_world_continues_bit_for_bit(name, phase, tmp_path_factory):
    for found in continuations(str(tmp_path_factory.getbasetemp() / "same world")):
        assert found[name, phase] == []


# Another world.


COMPRESSES = [Phase.WARMUP] * 2 + [Phase.COMPRESSED] * 9
PLAIN = {"axis": "data", "feedback": fn.classic()}

MAKES = {
    "classic": (partial(fn.onebit_adam, **PLAIN), COMPRESSES),
    "lazy": (partial(fn.onebit_adam, axis="data", feedback=fn.classic(lazy=True)), COMPRESSES),
    "gathered": (partial(fn.onebit_adam, servers=False, **PLAIN), COMPRESSES),
    "lamb": (partial(fn.onebit_lamb, **PLAIN), COMPRESSES),
    "sharded": (partial(fn.sharded_onebit_adam, **PLAIN), COMPRESSES),
    "loco": (partial(fn.loco_adamw, axis="data"), COMPRESSES),
    "coded": (partial(fn.onebit_adam, axis="data", warmup=fn.int4()), [Phase.WARMUP] * 11),
    "zero_one": (partial(fn.zero_one_adam, **PLAIN), [Phase.WARMUP] * 2 + [Phase.COMPRESSED] + [Phase.LOCAL] * 8),
}
ALIGN = {"loco": 2, "coded": 2}


def make(name: str) -> tuple[list[torch.nn.Parameter], fn.Optimizer]:
    generator = torch.Generator().manual_seed(4)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    with fn.bind(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))):
        return params, fn.Optimizer(params, MAKES[name][0], schedule=MAKES[name][1].__getitem__, lr=0.01)


def report(params: list[Any], opt: fn.Optimizer) -> dict[str, Any]:
    """Return this rank's errors as plain vectors, its moments and its params."""
    (state,) = opt.states
    places = [x for name in ("gradient_errors", "errors", "sync") for x in tree.fields(state, name)]
    errors = next(x for x in places if hasattr(x, "worker"))

    def plain(error: Any) -> torch.Tensor | None:
        if isinstance(error, torch.Tensor):
            return error.clone()
        if hasattr(error, "buffer"):  # one scale per tensor and row: only the sums below are compared
            return error.buffer.clone() if not error.scale.any() else None
        if hasattr(error, "codes"):
            rows, world = error.scales.shape[0], dist.get_world_size()
            lengths = [min(256, w - i) for w in widths_of(world, 2) for i in range(0, w, 256)]
            scales = error.scales.repeat_interleave(torch.tensor(lengths), dim=1)
            return (error.codes.view(rows, -1) * scales).view(-1).clone()
        return None

    return {
        "worker": [plain(e) for e in errors.worker],
        "server": [plain(e) for e in errors.server],
        "mu": [m.clone() for mu in tree.fields(state, "mu") for m in tree.leaves(mu)],
        "params": [p.detach().clone() for p in params],
        "gathered": not opt.make.keywords.get("servers", True),
        "fused": opt.make.func is fn.onebit_lamb,  # its tensors lie end to end
        "step": sum(float(e.scales.max()) for half in errors for e in half if hasattr(e, "codes")),
    }


def saving(folder: str, name: str, steps: int = 7) -> dict[str, Any]:
    params, opt = make(name)
    for t in range(steps):
        set_gradients(params, t)
        opt.step()
    checkpoint.save(f"{folder}/{name}", opt)
    return report(params, opt)


def loading(folder: str, name: str) -> dict[str, Any]:
    params, opt = make(name)
    for p in params:
        p.data.zero_()
    checkpoint.load(f"{folder}/{name}", opt)
    found = report(params, opt)
    checkpoint.save(f"{folder} on {dist.get_world_size()}/{name}", opt)
    others, by_hand = make(name)
    checkpoint.load(f"{folder} on {dist.get_world_size()}/{name}", by_hand)
    exact = same(bits((params, opt.states)), bits((others, by_hand.states)))
    set_gradients(params, 7)
    set_gradients(others, 7)
    for each in (opt, by_hand):
        each.step()
    finite = all(bool(torch.isfinite(p).all()) for p in params)
    delivered = same(bits((params, opt.states)), bits((others, by_hand.states)))
    return {**found, "finite": finite, "skipped": opt.skipped, "delivered": exact and delivered}


def undelivered(found: list[dict[str, Any]], align: int) -> list[torch.Tensor]:
    """Return (1 / W) sum of the worker errors + the server errors, tensor by tensor, as the layout's picture says."""
    world = len(found)
    total = sum(r["worker"][0].double() for r in found) / world
    if found[0]["gathered"]:  # in one row
        return apart(total, 1, align)
    if found[0]["server"] and found[0]["server"][0] is not None:
        total = total + torch.cat([r["server"][0].double() for r in found])
    return apart(total, world, align, found[0]["fused"])


def apart(vector: torch.Tensor, world: int, align: int, fused: bool = False) -> list[torch.Tensor]:
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    if fused:
        return list(vector[: sum(sizes)].split(sizes))
    pieces = vector.view(world, -1).split(widths_of(world, align), dim=1)
    return [piece.reshape(-1)[:n] for piece, n in zip(pieces, sizes, strict=True)]


def widths_of(world: int, align: int) -> list[int]:
    return [-(-torch.Size(shape).numel() // (world * align)) * align for shape in SHAPES]


def farthest(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Return the largest distance of two elements."""
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True) if x.numel())


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Return the largest relative distance over the tensors."""
    pairs = [(x.double().flatten(), y.double().flatten()) for x, y in zip(a, b, strict=True) if x.numel()]
    return max(float((x - y).norm() / x.norm().clamp(min=1e-30)) for x, y in pairs)


@functools.cache
def saved(folder: str, world: int) -> dict[str, list[dict[str, Any]]]:
    found = ranks.run(world, all_saving, f"{folder}/{world}")
    return {name: [rank[name] for rank in found] for name in MAKES}


def all_saving(folder: str) -> dict[str, Any]:
    return {name: saving(folder, name) for name in MAKES}


def all_loading(folder: str) -> dict[str, Any]:
    return {name: loading(folder, name) for name in MAKES}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [(3, 2), *(pytest.param(*worlds, marks=pytest.mark.reliability) for worlds in ((4, 3), (2, 4), (4, 1), (1, 4)))],
)
def test_another_world_keeps_the_undelivered_mean_and_goes_on(old, new, tmp_path_factory):
    folder = str(tmp_path_factory.getbasetemp() / "other world")
    before = saved(folder, old)
    ranked = ranks.run(new, all_loading, f"{folder}/{old}")
    after = {name: [rank[name] for rank in ranked] for name in MAKES}
    for name, found in after.items():
        assert all(rank["finite"] and rank["skipped"] == 0 and rank["delivered"] for rank in found), name
        if name != "zero_one":
            assert distance(before[name][0]["params"], found[0]["params"]) == 0
    if old > 1:  # one rank compresses nothing and has no errors
        for name, found in after.items():
            was = undelivered(before["classic" if name == "lazy" else name], ALIGN.get(name, 8))
            now = undelivered(found, ALIGN.get(name, 8))
            step = max(rank["step"] for rank in found)
            assert bool(step) == (name in ALIGN)
            assert distance(was, now) < 1e-6 if not step else farthest(was, now) < 1.01 * step, name
            assert max(float(x.norm()) for x in was) > 1e-5, name
        assert max(float(x.norm()) for x in undelivered(before["loco"], 2)) > 1e-3
    assert distance(before["classic"][0]["mu"], after["classic"][0]["mu"]) == 0
    shards = [torch.cat([r["mu"][0] for r in each]) for each in (before["loco"], after["loco"])]
    assert distance(apart(shards[0], old, 2), apart(shards[1], new, 2)) == 0
    for field in ("mu", "params"):
        mean = [sum(x) / old for x in zip(*(r[field] for r in before["zero_one"]), strict=True)]
        assert distance(mean, after["zero_one"][0][field]) < 1e-6


def said_while_loading(folder: str) -> dict[str, list[str]]:
    found = {}
    for name in MAKES:
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, records=records: records.append(record.getMessage())
        logging.getLogger("fn").addHandler(handler)
        checkpoint.load(f"{folder}/{name}", make(name)[1])
        logging.getLogger("fn").removeHandler(handler)
        found[name] = records
    return found


@pytest.mark.slow
def test_what_8_bits_round_off_is_said(tmp_path_factory):
    folder = str(tmp_path_factory.getbasetemp() / "other world")
    saved(folder, 3)
    (texts,) = ranks.run(1, said_while_loading, f"{folder}/3")
    said = {name for name in MAKES if any("up to one step of their codes is lost" in text for text in texts[name])}
    assert said == {*ALIGN}


# One rank's state_dict, as a plain trainer saves it.


def one_ranks_dict(name: str) -> tuple[list[str], Any, Any, bool, str]:
    params, opt = build(name, 1, fn.freeze_after(2))
    for t in range(5):
        set_gradients(params, t)
        opt.step()
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    box = [file.getvalue()]
    dist.broadcast_object_list(box, src=0)
    others, again = build(name, 1, fn.freeze_after(2))
    refused = ""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            again.load_state_dict(torch.load(io.BytesIO(box[0]), weights_only=True))
        except ValueError as error:
            refused = str(error)
    if dist.get_rank() == 1 and refused:
        return [], [], [], False, refused
    if name == "loco_adamw":  # the other rank was refused, so there is nobody to step with
        return [], [], [], False, ""
    texts = [str(w.message) for w in heard if "state_dict" in str(w.message)]
    errors = [bool(x.any()) for s in tree.fields(again.states, "sync") for x in tree.leaves(s)]
    with torch.no_grad():
        for p, q in zip(others, params, strict=True):
            p.copy_(q)
    set_gradients(others, 5)
    again.step()
    return texts, errors, bits(others), again.steps == 6, refused


def test_one_ranks_state_dict_resumes_on_all_with_errors_of_zero_and_says_what_was_lost():
    found = ranks.run(2, one_ranks_dict, "onebit_adam")
    assert found[0][0] == []
    assert any(found[0][1])  # rank 0 has its own
    ((text,), errors, _, went_on, _) = found[1]
    assert "is of rank 0 of 2, but this is rank 1 of 2" in text
    assert "start from zero" in text
    assert "fn.adapters.checkpoint" in text
    assert not any(errors)
    assert went_on
    assert same(found[0][2], found[1][2])


def test_one_ranks_state_dict_of_shards_is_refused_elsewhere_with_the_way_to_keep_them():
    found = ranks.run(2, one_ranks_dict, "loco_adamw")
    assert found[0][4] == ""
    assert "this is rank 1 of 2, and it holds shards of that rank only; save with fn.adapters" in found[1][4]


# What is refused.


def alone(steps: int = 3) -> tuple[list[torch.nn.Parameter], fn.Optimizer]:
    generator = torch.Generator().manual_seed(5)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(40, 30), (7,)]]
    opt = fn.Optimizer(params, fn.adamw, lr=0.01)
    train(params, opt, steps)
    return params, opt


def train(params: list[torch.nn.Parameter], opt: fn.Optimizer, steps: int) -> None:
    for _ in range(steps):
        generator = torch.Generator().manual_seed(opt.steps)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        opt.step()


def damage_cut(path: Path, dice: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: dice.randrange(len(data))])


def damage_bit(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    place = dice.randrange(8 * len(data))
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(("damage", "times"), [(damage_cut, 20), (damage_bit, 64)])
def test_a_file_that_was_cut_or_changed_is_refused_with_the_reason_and_nothing_is_loaded(damage, times, tmp_path):
    dice = random.Random(0)
    good = tmp_path / "good"
    params, opt = alone()
    checkpoint.save(good, opt)
    train(params, opt, 2)
    checkpoint.save(good, opt)
    names = sorted(p.relative_to(good) for p in (good / storage.newest(good).name).iterdir())
    names.append(Path("latest"))
    train(params, opt, 1)
    before = bits((params, opt.states))
    for i in range(times):
        bad = tmp_path / "bad"
        shutil.copytree(good, bad)
        victim = names[i % len(names)]
        damage(bad / victim, dice)
        with pytest.raises(CheckpointDamaged, match="not what was saved") as caught:
            checkpoint.load(bad, opt)
        assert caught.value.file == victim.name
        assert same(bits((params, opt.states)), before)
        shutil.rmtree(bad)
    assert len(names) >= 4
    checkpoint.load(good, opt, name="step-000000000003-0")  # the older one is still there
    assert opt.steps == 3


@pytest.mark.parametrize("sizes", [[[1, 2, 3]], [[1], [2, 3]], [[3], [2, 1]]])
def test_another_split_into_param_groups_is_refused_and_the_message_says_where_it_comes_from(sizes, tmp_path):
    """Another number of groups, as many with other counts of parameters, or of others."""

    def made(sizes: list[list[int]]) -> fn.Optimizer:
        groups = [{"params": [torch.nn.Parameter(torch.ones(n)) for n in group]} for group in sizes]
        return fn.Optimizer(groups, partial(fn.onebit_adam, axis="data"))

    checkpoint.save(tmp_path, made([[1, 2], [3]] if sizes[-1] != [2, 1] else [[1], [2, 3]]))
    with pytest.raises(ValueError, match=r"saved with other param groups: .* belong to their `elements`"):
        checkpoint.load(tmp_path, made(sizes))


def test_a_missing_file_an_empty_folder_and_another_optimizer_are_refused(tmp_path):
    _, opt = alone()
    with pytest.raises(FileNotFoundError, match="no finished checkpoint"):
        checkpoint.load(tmp_path, opt)
    found = checkpoint.save(tmp_path, opt)
    others = [torch.nn.Parameter(torch.ones(40, 30)), torch.nn.Parameter(torch.ones(8))]
    before = bits(others)
    with pytest.raises(ValueError, match=r"state\.|params\."):
        checkpoint.load(tmp_path, fn.Optimizer(others, fn.adamw, lr=0.01))
    with pytest.raises(ValueError, match=r"'state\..*' is"):
        checkpoint.load(tmp_path, fn.Optimizer(others, partial(fn.onebit_adam, axis="data"), lr=0.01))
    assert same(bits(others), before)
    next(found.glob("*.distcp")).unlink()
    with pytest.raises(CheckpointDamaged, match="is missing"):
        checkpoint.load(tmp_path, opt)


@pytest.mark.parametrize(
    ("give", "text"),
    [
        (lambda folder, opt: checkpoint.save(folder, torch.nn.Linear(2, 2), opt), "optimizer: .*got Linear"),
        (lambda folder, opt: checkpoint.load(folder, torch.optim.SGD([torch.ones(2)])), "optimizer: .*got SGD"),
        (lambda folder, opt: checkpoint.save(folder, opt, torch.nn.Linear(2, 2)), "extra: .*'the root' .*got Linear"),
        (lambda folder, opt: checkpoint.save(folder, opt, {"s": {"epoch": 3}}), "extra: .*'s.epoch' .*got int"),
        (lambda folder, opt: checkpoint.save_async(folder, opt, {"s": None}), "extra: .*'s' .*got NoneType"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name_before_a_file_is_written(give, text, tmp_path):
    with pytest.raises(TypeError, match=text):
        give(tmp_path, alone(0)[1])
    assert list(tmp_path.iterdir()) == []


def test_old_checkpoints_are_removed_and_an_async_save_is_of_the_moment_it_was_asked_for(tmp_path):
    params, opt = alone(1)
    for _ in range(3):
        checkpoint.save(tmp_path, opt, keep=2)
        train(params, opt, 1)
    before = bits((params, opt.states))
    future = checkpoint.save_async(tmp_path, opt, keep=2)
    train(params, opt, 3)
    assert future.result(60).name == "step-000000000004-0"
    checkpoint.load(tmp_path, opt)
    assert same(bits((params, opt.states)), before)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-000000000003-0", "step-000000000004-0"]


def test_a_save_under_torchrun_warns_of_a_store_that_is_kept_over_a_restart(tmp_path, monkeypatch):
    _, opt = alone(0)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.warns(UserWarning, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        checkpoint.save(tmp_path, opt)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        checkpoint.save(tmp_path, opt)


def async_on_ranks(folder: str) -> tuple[bool, str, list[str]]:
    params, opt = build("onebit_adam", 1, fn.freeze_after(2))
    own = timeout_of(dist.group.WORLD)
    patient, group = (dist.new_group(backend="gloo", timeout=t) for t in (2 * own, own))
    text = ""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", UserWarning)
        for each in (patient, group):
            checkpoint.save_async(folder, opt, group=each).result(60)
    said = [str(w.message) for w in heard if "group: waits" in str(w.message)]
    try:
        checkpoint.save_async(folder, opt)
    except ValueError as error:
        text = str(error)
    for t in range(4):
        set_gradients(params, t)
        opt.step()
    before = bits((params, opt.states))
    future = checkpoint.save_async(folder, opt, group=group)
    for t in range(4, 8):  # these exchange messages while the checkpoint is written
        set_gradients(params, t)
        opt.step()
    future.result(60)
    checkpoint.load(folder, opt)
    return same(bits((params, opt.states)), before), text, said


def saving_where_the_first_rank_cannot(folder: str) -> list[str]:
    found = []
    _, opt = make("zero_one")
    for act, where in ((checkpoint.save, f"{folder}/file/inside"), (checkpoint.load, f"{folder}/none")):
        try:
            act(where, opt)
        except OSError as error:
            found.append(type(error).__name__)
    return found


def test_what_one_rank_cannot_write_or_read_all_ranks_refuse(tmp_path):
    """The others would wait for a rank that is not coming until their time runs out."""
    (tmp_path / "file").write_text("not a folder")
    found = ranks.run(2, partial(saving_where_the_first_rank_cannot, str(tmp_path)))
    assert found[0] == found[1]
    assert len(found[0]) == 2


def saving_where_the_disk_is_full_for_one_rank(folder: str) -> list[str]:
    params, opt = build("onebit_adam", 1, fn.freeze_after(2))
    checkpoint.save(folder, opt)
    set_gradients(params, 0)
    opt.step()
    before, limits = bits((params, opt.states)), resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        checkpoint.save(folder, opt)
    except Exception as error:
        return [type(error).__name__, str(error), str(same(bits((params, opt.states)), before))]
    return []


def test_a_disk_that_is_full_in_the_middle_of_a_save_is_an_oserror_on_all_ranks_in_one_line(tmp_path):
    """torch's own is no `Exception`, which `except Exception` around a save does not catch, and prints a traceback."""
    for kind, text, unchanged in ranks.run(2, saving_where_the_disk_is_full_for_one_rank, str(tmp_path)):
        assert (kind, unchanged) == ("OSError", "True")
        assert "rank 1 could not write" in text
        assert "File too large" in text
        assert "\n" not in text
    assert storage.newest(tmp_path).name == "step-000000000000-0"


def test_an_async_save_beside_the_training_of_two_ranks(tmp_path):
    for exact, text, said in ranks.run(2, async_on_ranks, str(tmp_path)):
        assert exact
        assert "group: expected a process group of its own, but got None; pass dist.new_group(" in text
        (warning,) = said  # of the group that is more patient than the default one
        assert "a process does not end while a save waits: new_group(..., timeout=...)" in warning


def lost_in_a_save(folder: str) -> tuple[str, tuple[int, ...], bool]:
    """Kill rank 1 before the second save; the others stay afterwards."""
    params, opt = build("onebit_adam", 1, fn.freeze_after(2))
    checkpoint.save(folder, opt)
    set_gradients(params, 0)
    opt.step()
    before = bits((params, opt.states))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        checkpoint.save(folder, opt)
    except fn.PeerLost as error:
        ranks.stay()
        kind = "PeerLost" if "noticed in checkpoint.save" in str(error) else str(error)
        return kind, error.lost, same(bits((params, opt.states)), before)
    return "nothing", (), False


def test_a_rank_lost_in_a_save_is_named_on_all_others_and_the_old_checkpoint_stays(tmp_path):
    found = ranks.outcomes(4, lost_in_a_save, str(tmp_path))
    assert [found[0], *found[2:]] == [("PeerLost", (1,), True)] * 3
    assert storage.newest(tmp_path).name == "step-000000000000-0"


# Kills during a save: the old checkpoint or the new one, never a third.


def killed_in_save(folder: str, event: int | None, delay: float) -> None:
    """Take a step from the newest checkpoint and save it; die at a file event, or after a delay."""
    params, opt = alone(0)
    checkpoint.load(folder, opt)
    train(params, opt, 1)
    seen = [0]

    def hook(name: str, args: tuple) -> None:
        touches = name in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir")
        if touches and any(folder in str(arg) for arg in args):
            if seen[0] == event:
                os.kill(os.getpid(), signal.SIGKILL)
            seen[0] += 1

    sys.addaudithook(hook)
    if event is None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, delay)
    checkpoint.save(folder, opt, keep=2)
    signal.setitimer(signal.ITIMER_REAL, 0)


def kills(tmp_path: Path, events: Iterable[int], delays: Iterable[float], enough: int) -> tuple[int, int]:
    """Return how many kills, of `enough`, left the old checkpoint and how many the new one; fail on anything else.

    A save that is faster than its delay is not killed, and does not count.
    """
    folder = tmp_path / "run"
    params, opt = alone(0)
    reference = {0: bits((params, opt.states))}
    checkpoint.save(folder, opt)
    old, left = 0, [0, 0]
    for event, delay in chain(((e, 0.0) for e in events), ((None, d) for d in delays)):
        if sum(left) == enough:
            break
        (outcome,) = ranks.outcomes(1, killed_in_save, str(folder), event, delay)
        mine, again = alone(0)
        checkpoint.load(folder, again)
        while max(reference) < again.steps:
            train(params, opt, 1)
            reference[opt.steps] = bits((params, opt.states))
        assert again.steps in (old, old + 1)
        assert same(bits((mine, again.states)), reference[again.steps])
        if isinstance(outcome, ranks.Died):
            left[again.steps - old] += 1
        old = again.steps
    return left[0], left[1]


def test_a_kill_during_a_save_leaves_the_old_or_the_new_checkpoint(tmp_path):
    before, after = kills(tmp_path, range(0, 24, 3), [], 8)
    assert before
    assert before + after >= 6


@pytest.mark.reliability
def test_fifty_kills_during_saves_leave_the_old_or_the_new_checkpoint(tmp_path):
    dice = random.Random(1)
    delays = (0.0003 * 50 ** dice.random() for _ in range(150))  # up to 15 ms: a save takes from 5 ms on
    before, after = kills(tmp_path, range(38), delays, 50)
    print(f"kills: {before + after}, of which {before} left the old checkpoint and {after} the new one")
    assert before
    assert after
    assert before + after == 50
