"""`fn.labels_of`: which parameters are Muon's and Dion's, in pure loops, in `fn.Optimizer` and under DDP."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fn
from fn.adapters import ddp


class Model(nn.Module):
    """An embedding, a hidden layer and a head of as many outputs as the hidden layer, so that shapes tell nothing."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.byte = nn.Embedding(6, 6)
        self.hidden = nn.Linear(6, 6)
        self.conv = nn.Conv1d(6, 6, 3)
        self.head = nn.Linear(6, 6, bias=False)
        if tied:
            self.head.weight = self.byte.weight


def test_embeddings_heads_and_vectors_are_other() -> None:
    assert fn.labels_of(Model()) == {
        "byte.weight": "other",
        "hidden.weight": "hidden",
        "hidden.bias": "other",
        "conv.weight": "hidden",
        "conv.bias": "other",
        "head.weight": "other",
    }
    tied = fn.labels_of(Model(tied=True), heads=[])
    assert tied["byte.weight"] == "other"
    assert "head.weight" not in tied
    assert fn.labels_of(Model(), heads=[])["head.weight"] == "hidden"


def test_a_model_that_names_its_head_is_asked() -> None:
    class Named(Model):
        def get_output_embeddings(self) -> nn.Module:
            return self.hidden

    labels = fn.labels_of(nn.ModuleDict({"inside": Named()}))
    assert (labels["inside.hidden.weight"], labels["inside.head.weight"]) == ("other", "hidden")


def test_what_is_no_module_or_no_parameter_of_it_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, but got list"):
        fn.labels_of([1])
    labels = fn.labels_of(Model())
    with pytest.raises(ValueError, match=r"labels: .* that is none of them; call fn.labels_of"):
        fn.Optimizer(Model().parameters(), partial(fn.dion, axis="data"), labels=labels)
    with pytest.raises(ValueError, match="beside its make"):
        fn.Optimizer(Model().parameters(), partial(fn.dion, axis="data", labels=labels))
    with pytest.raises(ValueError, match="'hidden' or 'other'"):
        fn.dion(axis="data", labels={"w": "muon"}).init({"w": torch.ones(2, 2)})


def graded(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    return model


MAKES = {"muloco": partial(fn.muloco, axis="data"), "dion": partial(fn.dion, axis="data", rank=2)}


@pytest.mark.parametrize("name", MAKES)
def test_the_optimizer_labels_its_groups_as_the_pure_loop_its_tree(name: str) -> None:
    torch.manual_seed(0)
    model = Model()
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    tx = MAKES[name](lr=0.1, labels=fn.labels_of(model))
    state = tx.init(params)
    listed = [*model.parameters()]
    groups = [{"params": listed[::-2]}, {"params": [p for p in listed if all(p is not q for q in listed[::-2])]}]
    opt = fn.Optimizer(groups, MAKES[name], schedule=lambda step: fn.Phase.WARMUP, lr=0.1, labels=fn.labels_of(model))
    for step in range(3):
        graded(model, step)
        grads = {name: p.grad for name, p in model.named_parameters()}
        opt.step()
        updates, state = tx.update(fn.Phase.WARMUP)(grads, state, params)
        params = fn.apply_updates(params, updates)
    for path, p in model.named_parameters():
        if name == "muloco" or fn.labels_of(model)[path] == "other":  # Dion draws a basis for each matrix of a group
            torch.testing.assert_close(p.detach(), params[path], msg=path)


def moved(make: Any, labels: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = graded(Model(), 0)
    params = {name: p.detach() for name, p in model.named_parameters()}
    tx = make(lr=0.1, weight_decay=0.0, labels=labels)
    return tx.update(fn.Phase.WARMUP)({n: p.grad for n, p in model.named_parameters()}, tx.init(params), params)[0]


@pytest.mark.parametrize("name", MAKES)
def test_without_labels_an_embedding_is_orthogonalised_and_with_them_adamw_moves_it(name: str) -> None:
    torch.manual_seed(0)
    by_shape, labelled = moved(MAKES[name], None), moved(MAKES[name], fn.labels_of(Model()))
    steps_of = lambda updates, name: updates[name].abs()  # noqa: E731
    adams_first = torch.full((6, 6), 0.1)
    if name == "muloco":  # whose outer step is none in the warm-up
        torch.testing.assert_close(steps_of(labelled, "byte.weight"), adams_first, rtol=1e-5, atol=0)
    assert steps_of(labelled, "byte.weight").std() < 1e-6 < steps_of(by_shape, "byte.weight").std()
    assert labelled["hidden.weight"].abs().std() > 0.01


def test_what_dion_leaves_to_adamw_is_averaged_exactly() -> None:
    labels = {"a": "hidden", "b": "other"}
    grads = {name: torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("ab")}
    tx = fn.low_rank_average("data", 1, exactly=lambda params: {name: labels[name] == "other" for name in params})

    def mean(g: Any) -> Any:
        with fn.ledger() as sent:
            found = tx.update(fn.Phase.COMPRESSED)(g, tx.init(g), g)[0]
        books.append(sent.total)
        return found

    books: list[int] = []
    found = fn.simulate(mean, "data", 2)(grads)
    torch.testing.assert_close(found["b"][0], grads["b"].mean(0))
    assert (found["a"][0] - grads["a"].mean(0)).abs().max() > 0.1
    assert books == [4 * (8 + 8 + 64)]  # two thin factors, and a matrix


def test_ddp_optimizer_knows_the_module() -> None:
    model = graded(Model(), 0)
    opt = ddp.optimizer(model, fn.dion, lr=0.1)
    labels = fn.labels_of(model)
    assert [group["labels"] for group in opt.param_groups] == [labels.of(group["params"]) for group in opt.param_groups]
    opt.step()
    of_user = ddp.optimizer(model, partial(fn.dion, labels=lambda params: ["other"] * len(params)), lr=0.1)
    assert "labels" not in of_user.param_groups[0]
