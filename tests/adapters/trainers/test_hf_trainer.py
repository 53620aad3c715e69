"""`fn.adapters.trainers.hf` inside `transformers.Trainer`, on two ranks; `make trainers-test` has longer runs."""

from __future__ import annotations

import importlib.util
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from as_torchrun import as_started_by_torchrun, same_on_all_ranks, shared_folder
from ranks import Cases

import fn
from fn.adapters.agreed_params import agreed_pairs
from fn.adapters.trainers import hf

HERE = importlib.util.find_spec("transformers") is not None
pytestmark = pytest.mark.skipif(not HERE, reason="transformers is not installed")
case = Cases(2)
STEPS, SAVED = 6, 3
METHODS: dict[str, dict[str, Any]] = {
    "muloco": {"make": fn.muloco, "lr": 0.02, "schedule": fn.every(2), "rounds": 3, "codec": fn.int8()},
    "muon": {"make": fn.muon, "lr": 0.02},
}


class Tokens(torch.utils.data.Dataset):
    """Sequences that count upwards; a number of them that two ranks and batches of 4 do not divide."""

    def __init__(self, count: int = 45):
        self.x = (torch.randint(64, (count, 1), generator=torch.Generator().manual_seed(1)) + torch.arange(8)) % 64

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.x[i]}


def new_trainer(out: str, pair: Any = None, seed: int = 0, **settings: Any) -> Any:
    """Return a Trainer of a tiny GPT-2 in a rank of `Cases`, as if torchrun had started it."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    as_started_by_torchrun()
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    defaults = {"max_steps": STEPS, "save_steps": SAVED, "per_device_train_batch_size": 4, "logging_steps": 2}
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_nan_inf_filter": False}
    args = TrainingArguments(out, **{**defaults, **quiet, **settings})
    return Trainer(model, args, train_dataset=Tokens(), eval_dataset=Tokens(9), optimizer_cls_and_kwargs=pair)


def with_fn(out: str, method: str, **settings: Any) -> Any:
    trainer = new_trainer(out, hf.factory(**METHODS[method]), **settings)
    trainer.add_callback(hf.Callback(trainer))
    return trainer


def end(trainer: Any) -> dict[str, torch.Tensor]:
    """Return all that a run has come to: the model, the optimizer, and where the scheduler stands."""
    found = {f"model.{name}": x.clone() for name, x in trainer.model.state_dict().items()}
    found |= {name: x.clone() for name, x in trainer.optimizer.state_dict().items()}
    return found | {"lr": torch.tensor(trainer.lr_scheduler.get_last_lr())}


def resumed_beside_whole(method: str) -> tuple[list[str], int, bool]:
    """Train at once, and from a checkpoint with a model that starts elsewhere; return which tensors differ."""
    folder = shared_folder()
    whole = with_fn(folder, method, seed=dist.get_rank())  # rank 0's numbers count, as under DDP
    whole.train()
    again = with_fn(folder, method, seed=5)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED}")
    a, b = end(whole), end(again)
    assert a.keys() == b.keys()
    alike = same_on_all_ranks([x.tolist() for name, x in a.items() if name.startswith("model.")])
    return [name for name in a if not torch.equal(a[name], b[name])], whole.state.global_step, alike


@case
def muloco():
    return resumed_beside_whole("muloco")


@case
def muon():
    return resumed_beside_whole("muon")


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_run_resumes_bit_for_bit_with_what_is_each_ranks_own(method):
    for differing, steps, alike in case.answer(method):
        assert (differing, steps, alike) == ([], STEPS, True)


class Seen:
    """Is called in the middle of a round, with the trainer."""

    def __init__(self, trainer: Any):
        self.trainer, self.rows = trainer, []
        self.evaluation_loop = trainer.evaluation_loop
        trainer.evaluation_loop = self.look

    def look(self, *args: Any, **options: Any) -> Any:
        opt, params = self.trainer.optimizer.optimizer, [p.clone() for p in self.trainer.model.parameters()]
        self.rows.append((opt.steps, params))
        return self.evaluation_loop(*args, **options)


@case
def in_the_middle():
    """Evaluate and save behind step 3 of rounds of 2; the log of a step."""
    folder = shared_folder()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("fn").addHandler(handler)
    trainer = with_fn(folder, "muloco", eval_strategy="steps", eval_steps=SAVED, max_steps=3)
    seen, own = Seen(trainer), []
    original = trainer._save_optimizer_and_scheduler

    def at_save(path: str) -> None:
        own.extend(p.detach().clone() for p in trainer.model.parameters())
        original(path)

    trainer._save_optimizer_and_scheduler = at_save
    trainer.train()
    logging.getLogger("fn").removeHandler(handler)
    from safetensors.torch import load_file

    dist.barrier()
    saved = load_file(f"{folder}/checkpoint-3/model.safetensors")
    (steps, evaluated), names = seen.rows[0], [name for name, _ in trainer.model.named_parameters()]
    agreed = [x.clone() for _, x in agreed_pairs(trainer.optimizer.optimizer)]
    same = [bool(torch.equal(x, saved[n])) for n, x in zip(names, evaluated, strict=True) if n in saved]
    log = next(row for row in trainer.state.log_history if "loss" in row)
    dist.barrier()
    args = trainer.args
    return {
        "steps": steps,
        "saved is evaluated": all(same) and len(same) > 5,
        "agreed": all(map(torch.equal, evaluated, agreed)),
        "own": any(not torch.equal(x, y) for x, y in zip(own, evaluated, strict=True)),
        "at the end": all(map(torch.equal, agreed, [p.detach() for p in trainer.model.parameters()])),
        "log": {name: log[name] for name in ("bytes_sent", "skipped_steps")},
        "records": records,
        "switched off": (args.max_grad_norm, args.average_tokens_across_devices),
        "norm": trainer.optimizer.optimizer.max_norm,
        "labels": trainer.optimizer.optimizer.param_groups[0]["labels"].count("hidden"),
        "hooked": trainer.model_wrapped.find_unused_parameters,
    }


def test_in_the_middle_of_a_round_the_agreed_params_are_evaluated_and_saved_and_own_ones_go_on():
    for rank, found in enumerate(case.answer("in_the_middle")):
        assert found["steps"] == 3
        assert found["saved is evaluated"]
        assert found["agreed"]
        assert found["own"]
        assert found["at the end"]
        assert found["log"]["bytes_sent"] > 0
        assert found["log"]["skipped_steps"] == 0
        assert found["switched off"] == (0.0, False)
        assert found["norm"] == 1.0
        assert found["labels"] == 4  # c_attn, c_proj, c_fc and c_proj of the one block
        assert not found["hooked"]
        said = [text.partition(":")[0] for text in found["records"]]
        assert said == (["max_grad_norm", "average_tokens_across_devices"] if rank == 0 else [])


@case
def best():
    """Load what has the largest loss, for that is the earliest: of step 3, in the middle of a round."""
    from safetensors.torch import load_file

    folder = shared_folder()
    settings = {"metric_for_best_model": "eval_loss", "greater_is_better": True, "eval_strategy": "steps"}
    trainer = with_fn(folder, "muloco", load_best_model_at_end=True, eval_steps=SAVED, **settings)
    trainer.train()
    saved = load_file(f"{folder}/checkpoint-{SAVED}/model.safetensors")
    loaded = [torch.equal(p, saved[name]) for name, p in trainer.model.named_parameters() if name in saved]
    best = trainer.state.best_model_checkpoint, trainer.state.best_metric
    return best[0] == f"{folder}/checkpoint-{SAVED}", all(loaded), trainer.evaluate()["eval_loss"] == best[1]


def test_load_best_model_at_end_loads_the_agreed_params_that_were_evaluated():
    assert case.answer("best") == [(True, True, True)] * 2


@case
def int4():
    """The Trainer's own AdamW, with gradients in codes: at once, and resumed; and without codes."""
    folder = shared_folder()
    runs = []
    for codes, start in ((True, None), (True, f"{folder}/checkpoint-{SAVED}"), (False, None)):
        out = folder if codes else f"{folder}/plain"
        trainer = new_trainer(out, seed=0 if start is None else 5, learning_rate=1e-2)
        if codes:
            hf.average_gradients(trainer)
        trainer.train(resume_from_checkpoint=start)
        runs.append([p.detach().clone() for p in trainer.model.parameters()])
    dist.barrier()
    whole, again, plain = runs
    far = max(float((x - y).abs().mean()) for x, y in zip(whole, plain, strict=True))
    return all(map(torch.equal, whole, again)), same_on_all_ranks([p.tolist() for p in whole]), far


def test_int4_gradients_of_a_trainer_that_keeps_its_optimizer_resume_bit_for_bit():
    for resumed, alike, far in case.answer("int4"):
        assert resumed
        assert alike
        assert 0 < far < 0.03  # in the mean of a tensor; six steps are 0.035


@case
def refusals():
    """The message of everything that is refused."""
    out = str(Path(tempfile.gettempdir(), "fn-refused"))

    def refused(make: Any = hf.Callback, pair: Any = None, later: dict[str, Any] | None = None, **settings: Any) -> str:
        trainer = new_trainer(out, pair or hf.factory(**METHODS["muloco"]), **settings)
        for name, value in (later or {}).items():
            setattr(trainer.args, name, value)
        try:
            make(trainer)
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    numbers = METHODS["muloco"]
    return {
        "deepspeed": refused(later={"deepspeed": {"zero_optimization": {"stage": 2}}}),
        "fsdp": refused(later={"fsdp": True}),
        "unused": refused(ddp_find_unused_parameters=True),
        "fp16": refused(later={"fp16": True}),
        "fp16 without local steps": refused(pair=hf.factory(fn.muon, lr=0.02), later={"fp16": True}),
        "learning_rate": refused(learning_rate=1e-3),
        "beta": refused(adam_beta2=0.95),
        "two norms": refused(pair=hf.factory(**numbers, max_norm=0.5), max_grad_norm=2.0),
        "one norm": refused(pair=hf.factory(**numbers, max_norm=0.5)),
        "no norm": refused(pair=hf.factory(**numbers, max_norm=0.5), max_grad_norm=0.0),
        "no factory": refused(pair=(torch.optim.SGD, {"lr": 0.1})),
        "int4 deepspeed": refused(make=hf.average_gradients, later={"deepspeed": {"zero_optimization": {"stage": 2}}}),
        "no callback": refused(make=lambda trainer: trainer.train()),
    }


def test_what_does_not_fit_is_refused_by_name_with_the_cure():
    for found in case.answer("refusals"):
        assert found["deepspeed"].startswith("ValueError: deepspeed: expected None where fn communicates, but got {")
        assert found["deepspeed"].endswith("take the drop-ins of fn.adapters.deepspeed")
        assert found["int4 deepspeed"] == found["deepspeed"]
        assert found["fsdp"].startswith("ValueError: fsdp: expected None where fn communicates, but got True; ")
        assert "examples/fsdp2_muon.py" in found["fsdp"]
        assert found["unused"].startswith("ValueError: ddp_find_unused_parameters: expected False")
        assert "requires_grad_(False)" in found["unused"]
        assert found["fp16"].startswith("ValueError: fp16: expected False with local steps")
        assert "bf16" in found["fp16"]
        assert found["fp16 without local steps"] == "accepted"
        assert found["learning_rate"].startswith("ValueError: learning_rate: expected its default, 5e-05, but got 0.00")
        assert found["beta"].startswith("ValueError: adam_beta2: expected its default, 0.999, but got 0.95")
        assert found["two norms"].startswith("ValueError: max_grad_norm: expected max_norm=0.5 of hf.factory or")
        assert found["one norm"] == found["no norm"] == "accepted"
        assert found["no factory"].startswith("TypeError: trainer: expected optimizer_cls_and_kwargs=hf.factory(...)")
        assert "trainer.add_callback(hf.Callback(trainer))" in found["no callback"]
