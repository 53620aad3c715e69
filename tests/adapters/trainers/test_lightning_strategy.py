"""`fn.adapters.trainers.lightning` inside Lightning's Trainer, on two ranks."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from as_torchrun import as_started_by_torchrun, same_on_all_ranks, shared_folder
from ranks import Cases

import fn
from fn.adapters.trainers import lightning

HERE = importlib.util.find_spec("lightning") is not None
pytestmark = pytest.mark.skipif(not HERE, reason="lightning is not installed")
case = Cases(2)
METHODS: dict[str, dict[str, Any]] = {
    "muloco": {"make": fn.muloco, "lr": 0.02, "schedule": fn.every(3), "codec": fn.int8()},
    "muon": {"make": fn.muon, "lr": 0.02},
}


def module(seed: int = 0, optimizer: Any = None, **numbers: Any) -> Any:
    """Return a LightningModule with the optimizer of `fn`; it keeps the params that it is validated with."""
    from lightning.pytorch import LightningModule

    class Regression(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
            self.validated: list[list[Any]] = []

        def loss(self, batch: Any) -> torch.Tensor:
            return (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.loss(batch)

        def validation_step(self, batch: Any, index: int) -> None:
            self.validated.append([p.tolist() for p in self.net.parameters()])
            self.log("val_loss", self.loss(batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            if optimizer is not None:
                return optimizer(self.parameters())
            opt = lightning.optimizer(self, **numbers)
            scheduler = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, 6)
            return {"optimizer": opt, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Regression()


def trainer(folder: str, **options: Any) -> Any:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    as_started_by_torchrun()
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saving = ModelCheckpoint(folder, "{step}", every_n_epochs=1, save_on_train_epoch_end=True, save_top_k=-1)
    strategy = lightning.FnStrategy(process_group_backend="gloo")
    defaults = {"max_epochs": 2, "accumulate_grad_batches": 2, "val_check_interval": 6, **quiet}
    return Trainer(accelerator="cpu", devices=2, strategy=strategy, callbacks=[saving], **{**defaults, **options})


def loaders() -> list[Any]:
    """Batches for four steps an epoch; Lightning begins an epoch anew where it was left."""
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))  # 7 batches of 4 a rank, the last one of 1
    return [torch.utils.data.DataLoader(x, batch_size=4) for _ in range(2)]


def resumed_beside_whole(method: str) -> dict[str, Any]:
    folder = shared_folder()
    whole = module(seed=dist.get_rank(), **METHODS[method])
    run = trainer(folder)
    run.fit(whole, *loaders())
    dist.barrier()
    saved = Path(folder, "step=4.ckpt")
    again = module(seed=5, **METHODS[method])
    resumed = trainer(folder + "/again")
    resumed.fit(again, *loaders(), ckpt_path=str(saved))
    a, b = ({**t.optimizers[0].state_dict(), **t.lightning_module.state_dict()} for t in (run, resumed))
    return {
        "differing": [name for name, x in a.items() if not torch.equal(x, b[name])],
        "steps": int(a["steps"]),
        "agreed": same_on_all_ranks([x.tolist() for x in whole.state_dict().values()]),
        "validated": same_on_all_ranks(whole.validated),
        "validations": len(whole.validated),
        "own": sorted(path.name for path in Path(f"{saved}.ranks").iterdir()),
    }


@case
def muloco():
    return resumed_beside_whole("muloco")


@case
def muon():
    return resumed_beside_whole("muon")


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_fit_resumes_bit_for_bit_and_validates_with_the_agreed_params(method):
    for found in case.answer(method):
        assert found["differing"] == []
        assert found["steps"] == 8
        assert found["agreed"]
        assert found["validated"]
        assert found["validations"] >= 14  # twice seven batches and more, for it also looks before the fit
        assert found["own"] == ["fn-0-rank-0-of-2.pt", "fn-0-rank-1-of-2.pt"]


@case
def refusals() -> dict[str, str]:
    from lightning.pytorch.plugins import MixedPrecision

    folder = shared_folder()

    def refused(f: Any) -> str:
        try:
            f()
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, 0.1)

    def scaling() -> Any:
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))

    numbers = METHODS["muloco"]
    return {
        "unused": refused(lambda: lightning.FnStrategy(find_unused_parameters=True)),
        "torch": refused(lambda: trainer(folder).fit(module(optimizer=sgd), *loaders())),
        # Lightning itself takes bf16 for "16-mixed" on a CPU.
        "fp16": refused(lambda: trainer(folder, plugins=[scaling()]).fit(module(**numbers), *loaders())),
        "clipping": refused(lambda: trainer(folder, gradient_clip_val=1.0).fit(module(**numbers), *loaders())),
    }


def test_what_does_not_fit_is_refused_by_name_with_the_cure():
    for found in case.answer("refusals"):
        assert found["unused"].startswith("ValueError: find_unused_parameters: expected False")
        assert found["torch"].startswith("TypeError: configure_optimizers: expected an fn.Optimizer, but got SGD")
        assert found["clipping"].startswith("ValueError: gradient_clip_val: expected 0")
        assert found["fp16"].startswith("ValueError: precision: expected 'bf16-mixed' or '32-true' with local steps")
        assert "but got 16-mixed; train in bf16" in found["fp16"]
