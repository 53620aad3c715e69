"""The real trainers under torchrun, on two gloo ranks: scripts as people write them, changed by the lines of the docs.

`make trainers-test` runs this; a trainer that is not installed is skipped. Short runs inside of one process of a test
are in tests/adapters/trainers.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent

pytestmark = [pytest.mark.trainers, pytest.mark.reliability]


def torchrun(script: Path, out: Path, *arguments: str, ranks: int = 2) -> list[dict[str, Any]]:
    """Run a script, without torchrun if it has a single process; return what each rank has saved at its end."""
    out.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(launcher if ranks > 1 else [])]
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(
        [*command, str(script), "--out", str(out), *arguments],
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [torch.load(out / f"end-{rank}.pt", weights_only=False) for rank in range(ranks)]


def differing(a: Any, b: Any) -> list[str]:
    """Return which tensors of two state dicts differ."""
    assert a.keys() == b.keys()
    return [name for name, x in a.items() if isinstance(x, torch.Tensor) and not torch.equal(x, b[name])]


END = "eval_dataset=Tokens(31, 2))\n"
FACTORY = "optimizer_cls_and_kwargs=fn.adapters.trainers.hf.factory({})"
CALLBACK = "trainer.add_callback(fn.adapters.trainers.hf.Callback(trainer))"
CHANGED = {
    "import torch\n": "import torch\nimport fn.adapters.trainers.hf\n",
    END: f"eval_dataset=Tokens(31, 2), {{}})\n{CALLBACK}\n",
}
METHODS = {
    "muloco": "fn.muloco, lr=0.02, schedule=fn.every(4), codec=fn.int8()",
    "diloco": "fn.diloco, lr=3e-3, schedule=fn.every(4)",
    "sign_muon": "fn.sign_muon, lr=0.02, schedule=fn.freeze_after(2)",
    "muon": "fn.muon, lr=0.02",
    "onebit_adam": "fn.onebit_adam, lr=3e-3, schedule=fn.freeze_after(8)",
}
ADAMW = {"use_cpu=True": "use_cpu=True, learning_rate=3e-3"}
LORA = """from peft import LoraConfig, get_peft_model

model = get_peft_model(GPT2LMHeadModel(config), LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))
"""


def script(text: str, changes: dict[str, str], folder: Path) -> Path:
    """Write a script that is another one with changes."""
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "script.py"
    path.write_text(text)
    return path


BASE = (HERE / "train_with_trainer.py").read_text()


def with_method(numbers: str) -> dict[str, str]:
    return {**CHANGED, END: CHANGED[END].format(FACTORY.format(numbers))}


@functools.cache
def adamw() -> float:
    """Return the loss of the script as it is, at a rate that fits."""
    with tempfile.TemporaryDirectory() as folder:
        ends = torchrun(script(BASE, ADAMW, Path(folder)), Path(folder, "out"))
        return loss_of(ends)


def loss_of(ends: list[dict[str, Any]]) -> float:
    losses = [row["eval_loss"] for row in ends[0]["log"] if "eval_loss" in row]
    assert len(losses) == 5  # every 6 of 24 steps, and at the end
    assert losses[-1] < losses[0]
    return float(losses[-1])


@pytest.fixture(autouse=True)
def installed():
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")


def check_run_and_resume(text: str, changes: dict[str, str], folder: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """Train, and again from a checkpoint in the middle of a round; return what the ranks of the first end with."""
    path = script(text, changes, folder)
    whole = torchrun(path, folder, ranks=ranks)
    resumed = torchrun(path, folder, "--resume", f"{folder}/checkpoint-10", ranks=ranks)
    for a, b in zip(whole, resumed, strict=True):
        assert differing(a["model"], whole[0]["model"]) == []  # agreed on at the end
        assert differing(a["model"], b["model"]) == []
        assert differing(a["opt"], b["opt"]) == []
    assert loss_of(whole) == loss_of(resumed)
    return whole


@pytest.mark.parametrize("method", sorted(METHODS))
def test_three_lines_make_trainer_train_with_it_and_it_resumes_bit_for_bit(method, tmp_path):
    changes = with_method(METHODS[method])
    changed = script(BASE, changes, tmp_path).read_text()
    lines = [line for line in difflib.ndiff(BASE.splitlines(), changed.splitlines()) if line[:2] == "+ "]
    assert len(lines) == 3
    ends = check_run_and_resume(BASE, changes, tmp_path)
    print(f"{method}: {loss_of(ends):.3f}, AdamW {adamw():.3f}")
    assert loss_of(ends) < 1.25 * adamw()
    assert ends[0]["log"][-1] is not None
    assert any(row.get("bytes_sent", 0) > 0 for row in ends[0]["log"])


def test_a_single_process_trains_without_torchrun(tmp_path):
    (end,) = check_run_and_resume(BASE, with_method(METHODS["muloco"]), tmp_path, ranks=1)
    assert {row["bytes_sent"] for row in end["log"] if "loss" in row} == {0}


@pytest.mark.parametrize(
    "settings", ["bf16=True", "torch_compile=True, torch_compile_backend='aot_eager'", "gradient_checkpointing=True"]
)
def test_muloco_goes_with_what_people_set(settings, tmp_path):
    changes = {**with_method(METHODS["muloco"]), "use_cpu=True": f"use_cpu=True, {settings}"}
    check_run_and_resume(BASE, changes, tmp_path)


@pytest.mark.parametrize("method", ["muloco", "muon"])
def test_lora_trains_its_factors_by_adamw(method, tmp_path):
    if importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")
    changes = {**with_method(METHODS[method]), "model = GPT2LMHeadModel(config)\n": LORA}
    ends = check_run_and_resume(BASE, changes, tmp_path)
    # Two factors of two matrices in each of two layers: AdamW's second moments, which fn.muon's ranks share; no Muon's.
    names = [name for end in ends for name in end["opt"]]
    assert sum(".adamw." in name and ".nu." in name for name in names) == (8 if method == "muon" else 16)
    assert not any(".muon." in name for name in names)
