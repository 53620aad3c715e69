"""Every method: two trainers that publish, and a follower without ranks has the same parameters after every step."""

from __future__ import annotations

import functools
import itertools
import re
import tempfile
from functools import partial
from pathlib import Path

import pytest
import ranks
import torch
from logs import served
from published_methods import (
    ALL,
    CASES,
    FEW,
    LONG,
    MANY,
    NOT_FOLLOWED,
    OVER_AXES,
    SHORT,
    agreed,
    all_trained,
    follower,
    make_of,
    many_tensors,
    model,
)
from safetensors.torch import load_file

import fn
from fn.adapters.follow import Follower
from fn.adapters.follow.log_reader import LogReader


@functools.cache
def runs(steps, over_axes):
    folder = tempfile.mkdtemp()
    world, names = (4, OVER_AXES) if over_axes else (2, CASES)
    return ranks.outcomes(world, all_trained, [*names], folder, steps, patience=ranks.PATIENCE)[0], Path(folder)


def run(name, steps=SHORT):
    found, folder = runs(steps, name in OVER_AXES)
    assert isinstance(found, dict), found
    return found[name], folder / name


def check(source, name, found, steps):
    _, mine = follower(source, ALL[name])
    taken = []
    for step in mine:
        taken.append(step)
        assert torch.equal(agreed(mine.optimizer), found[step]), step
    assert taken == [*range(steps)]
    assert not torch.equal(found[2], found[steps - 1][: found[2].numel()])


@pytest.mark.parametrize("steps", [SHORT, pytest.param(LONG, marks=pytest.mark.reliability)])
@pytest.mark.parametrize("name", [name for name in ALL if name not in NOT_FOLLOWED])
def test_a_follower_has_the_parameters_after_every_step(name, steps):
    found, folder = run(name, steps)
    check(folder, name, found, steps)


@pytest.mark.parametrize("steps", [SHORT, pytest.param(LONG, marks=pytest.mark.reliability)])
def test_and_over_http(steps):
    found, folder = run("onebit_adam", steps)
    with served(folder) as (url, _):
        check(url, "onebit_adam", found, steps)


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_a_method_that_nobody_can_follow_is_refused(name):
    said, folder = run(name)
    assert re.match(f"optimizer: {NOT_FOLLOWED[name]}", said), said
    assert not folder.exists()


@pytest.mark.parametrize("name", MANY)
def test_a_log_of_hundreds_of_tensors_is_little_longer_than_the_codes(name):
    found, folder = run(f"{name} of many")
    params = many_tensors()
    net = torch.nn.ParameterList(params)
    mine = Follower(folder, net, make_of(ALL[name]))
    assert [*mine] == [*range(FEW)]
    assert torch.equal(agreed(mine.optimizer), found)
    reader, total = LogReader(folder), sum(p.stat().st_size for p in folder.glob("*.log"))
    frames = [[leaf for _, leaves in reader.frame(step).records for leaf in leaves] for step in range(FEW)]
    codes = sum(map(len, itertools.chain(*frames)))
    assert codes < total <= 1.02 * codes + 256 * FEW
    assert codes > 0


def test_gradients_that_ddp_averaged_are_in_the_log_as_codes():
    _, folder = run("mean in int4")
    reader, numbers = LogReader(folder), sum(p.numel() for p in model().parameters())
    sizes = [sum(len(leaf) for key, leaves in reader.frame(step).records if key[0] == "mean" for leaf in leaves)
             for step in (2, 18)]  # fmt: skip
    assert sizes[0] == 4 * numbers  # an exact warm-up
    assert numbers / 2 <= sizes[1] < 0.7 * numbers


def test_another_average_of_the_gradients_is_refused():
    _, folder = run("mean in int4")
    case = ALL["mean in int4"]
    with pytest.raises(ValueError, match=r"average: expected that of the run, whose .*int4"):
        follower(folder, case._replace(average=partial(fn.compressed_average, codec=fn.int8(), feedback=fn.damped())))
    with pytest.raises(ValueError, match=r"average: expected what averaged the gradients of the run, .* but got None"):
        follower(folder, case._replace(average=None))
    with pytest.raises(ValueError, match=r"average: expected what averaged the gradients of the run, .* a function"):
        follower(run("adamw")[1], ALL["adamw"]._replace(average=case.average))


def test_a_command_decodes_gradients_that_ddp_averaged(tmp_path):
    found, folder = run("mean in int8, without servers")
    (tmp_path / "of_run.py").write_text(
        "import functools, torch, fn\n"
        "def made():\n"
        "    layers = [torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16), torch.nn.Linear(16, 4)]\n"
        "    average = functools.partial(fn.compressed_average, codec=fn.int8(), servers=False)\n"
        "    return torch.nn.Sequential(*layers), fn.adamw, average\n"
    )
    ended = ranks.python(
        *("-m", "fn", "log", str(folder), "--make", "of_run:made", "--out", "step10.safetensors", "--replay", "10"),
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    written = load_file(tmp_path / "step10.safetensors")
    trained = [written[name].reshape(-1) for name in ("0.weight", "0.bias", "2.weight", "2.bias")]
    assert torch.equal(torch.cat(trained), found[10])
