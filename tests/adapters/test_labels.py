"""`fn.labels_of`: which parameters are Muon's and Dion's, in pure loops, in `fn.Optimizer` and under DDP."""

from __future__ import annotations

import copy
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
        "conv.weight": "other",
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
    in_two = fn.labels_of(MODEL, splits={"qkv.weight": (8, 8)})
    with pytest.raises(ValueError, match=r"labels: expected tensors that are taken whole, .*; write labels"):
        fn.dion(axis="data", labels=in_two).init(dict(MODEL.named_parameters()))
    with pytest.raises(ValueError, match="'hidden' or 'other'"):
        fn.dion(axis="data", labels={"w": "muon"}).init({"w": torch.ones(2, 2)})


class Experts(nn.Module):
    """As in transformers: the gate and the way up of all experts in one tensor."""

    def __init__(self, experts: int, width: int, inner: int, *, columns: bool = False) -> None:
        super().__init__()
        up, down = (2 * inner, width), (width, inner)
        self.gate_up_proj = nn.Parameter(torch.randn(experts, *(up[::-1] if columns else up)))
        self.down_proj = nn.Parameter(torch.randn(experts, *(down[::-1] if columns else down)))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(experts, 2 * inner))


class TopKRouter(nn.Module):
    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width))


class Block(nn.Module):
    """A layer of a Mixtral or, with a shared expert, of a Qwen: `gate` is a router, `gate_proj` is none."""

    def __init__(self, experts: int = 4, width: int = 8, inner: int = 6) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 2 * width, bias=False)
        self.mlp = nn.ModuleDict(
            {
                "gate": TopKRouter(experts, width),
                "experts": Experts(experts, width, inner),
                "shared_expert": nn.ModuleDict({"gate_proj": nn.Linear(width, experts), "up": nn.Linear(width, 5)}),
                "shared_expert_gate": nn.Linear(width, 1, bias=False),
                "wg": nn.Linear(width, experts, bias=False),
            }
        )


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens, self.layer, self.lm_head = nn.Embedding(9, 8), Block(), nn.Linear(8, 9, bias=False)
        self.pos_embed = nn.Parameter(torch.zeros(5, 8))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))


def test_experts_are_hidden_and_routers_and_position_embeddings_are_other() -> None:
    labels = fn.labels_of(Mixture())
    hidden = ["qkv.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    hidden += ["mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up.weight"]
    assert [name for name, label in labels.items() if label == "hidden"] == [f"layer.{name}" for name in hidden]
    assert set(labels.values()) == {"hidden", "other"}
    up, down = (labels[f"layer.mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
    assert ([x.shape for x in up.parts(torch.zeros(4, 12, 8))], type(down)) == ([(4, 6, 8), (4, 6, 8)], str)
    assert copy.deepcopy(up).splits == (6, 6)  # as a copy of an optimizer has it


@pytest.mark.parametrize(
    ("model", "hidden"),
    [
        (nn.ModuleDict({"experts": Experts(4, 8, 6, columns=True)}), ["experts.gate_up_proj", "experts.down_proj"]),
        (nn.ModuleDict({"conv": nn.Conv2d(4, 4, 3), "router": nn.Linear(4, 4), "gate_proj": nn.Linear(4, 4)}),
         ["gate_proj.weight"]),
        (nn.ModuleDict({"mlp": nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(4, 4)]), "gate": nn.Linear(4, 1)})}),
         ["mlp.experts.0.weight"]),
    ],
    ids=["fused in columns", "layers", "a list of experts"],
)  # fmt: skip
def test_what_is_hidden_is_whole_where_no_rows_are_fused(model: nn.Module, hidden: list[str]) -> None:
    labels = fn.labels_of(model, heads=[])
    assert [name for name, label in labels.items() if label == "hidden"] == hidden
    assert {type(label) for label in labels.values()} == {str}


def test_a_parameter_named_experts_is_a_stack_and_its_router_lies_beside_it() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Parameter(torch.zeros(3, 4, 5))
            self.scores, self.up = nn.Linear(5, 3, bias=False), nn.Linear(5, 4, bias=False)

    labels = fn.labels_of(Layer(), heads=[])
    assert labels == {"experts": "hidden", "scores.weight": "other", "up.weight": "hidden"}


MODEL = nn.ModuleDict({"qkv": nn.Linear(9, 16), "out": nn.Linear(16, 12)})


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"splits": {"kqv.weight": (8, 8)}}, r"splits: expected names of parameters, .*, but got 'kqv.weight'"),
        ({"num_heads": {"qkv": 4}}, r"num_heads: expected names of parameters, .*, but got 'qkv'"),
        ({"splits": {"qkv.weight": (8, 4, 5)}}, r"splits: .* the 16 rows of 'qkv.weight', but got \(8, 4, 5\)"),
        ({"splits": {"qkv.weight": (20, -4)}}, r"splits: .* the 16 rows of 'qkv.weight', but got \(20, -4\)"),
        ({"splits": {"qkv.weight": 16}}, r"splits: .* the 16 rows of 'qkv.weight', but got 16"),
        ({"splits": {"qkv.bias": (8, 8)}}, r"splits: expected parameter 'qkv.bias' to be a matrix, .* shape \(16,\)"),
        ({"num_heads": {"qkv.weight": 5}}, r"num_heads: expected a divisor of the 16 rows of 'qkv.weight', but got 5"),
        ({"num_heads": {"qkv.weight": 0}}, r"num_heads: expected a divisor of the 16 rows of 'qkv.weight', but got 0"),
        ({"num_heads": {"qkv.weight": 4}, "splits": {"qkv.weight": (8, 8)}}, r"num_heads: .* got 'qkv.weight'; heads"),
    ],
    ids=str,
)
def test_splits_and_heads_that_do_not_fit_are_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        fn.labels_of(MODEL, **given)


def in_parts(params: Any) -> list[torch.Tensor]:
    """Return blocks, heads, and what is whole, as tensors of their own."""
    return [*params["qkv.weight"].split((8, 4, 4)), *params["out.weight"].split(4), *params["experts"].unbind()]


LABELLED = {
    "muon": fn.muon,
    "muon, by rows": partial(fn.muon, scale="rms_norm", other="lion"),
    "muloco": partial(fn.muloco, axis="data"),
    "sign_muon": partial(fn.sign_muon, axis="data"),
}


@pytest.mark.parametrize("name", LABELLED)
def test_blocks_and_heads_are_stepped_as_tensors_of_their_own(name: str) -> None:
    torch.manual_seed(0)
    shapes = {"qkv.weight": (16, 9), "out.weight": (12, 16), "experts": (2, 6, 4)}
    model = nn.ParameterDict()
    for path, shape in shapes.items():
        model.register_parameter(path.replace(".", "_"), nn.Parameter(torch.randn(shape)))
    of_model = fn.labels_of(model, heads=[], splits={"qkv_weight": (8, 4, 4)}, num_heads={"out_weight": 3})
    labels = {path: of_model[path.replace(".", "_")] for path in shapes}
    params = {path: torch.randn(shape) for path, shape in shapes.items()}
    tx, apart = (LABELLED[name](lr=0.1, labels=given) for given in (labels, None))
    state, of_parts, parts = tx.init(params), apart.init(in_parts(params)), in_parts(params)
    for _ in range(3):
        grads = {path: torch.randn(shape) for path, shape in shapes.items()}
        updates, state = tx.update(fn.Phase.WARMUP)(grads, state, params)
        params = fn.apply_updates(params, updates)
        updates, of_parts = apart.update(fn.Phase.WARMUP)(in_parts(grads), of_parts, parts)
        parts = fn.apply_updates(parts, updates)
    for ours, theirs in zip(in_parts(params), parts, strict=True):
        torch.testing.assert_close(ours, theirs)


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
