"""`fn.labels_of` on models of transformers: experts, routers, heads, position embeddings; and Muon on one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fn

pytestmark = pytest.mark.trainers

TINY = {
    "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 32,
    "num_local_experts": 4, "num_experts": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
ATTENTION = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"}
EXPERTS = {"experts.gate_up_proj", "experts.down_proj"}
SHARED = {f"shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")}
HIDDEN: dict[str, tuple[str, dict[str, Any], set[str], bool]] = {
    "MixtralForCausalLM": ("MixtralConfig", {}, ATTENTION | EXPERTS, True),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {}, ATTENTION | EXPERTS, True),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", {}, ATTENTION | EXPERTS | SHARED, True),
    "GptOssForCausalLM": ("GptOssConfig", {}, ATTENTION | EXPERTS, False),
    "Llama4ForCausalLM": ("Llama4TextConfig", {"intermediate_size_mlp": 24}, ATTENTION | EXPERTS | SHARED, False),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"n_embd": 16, "n_layer": 1, "n_head": 2},
        {"attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"},
        False,
    ),
}
"""The class of a model -> that of its config, what differs from TINY, the ends of the names that are hidden, and
whether the rows of its experts are fused."""


def model_of(name: str) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    config, more, *_ = HIDDEN[name]
    torch.manual_seed(0)
    model: torch.nn.Module = getattr(transformers, name)(getattr(transformers, config)(**{**TINY, **more}))
    return model


@pytest.mark.parametrize("name", HIDDEN)
def test_what_is_hidden_in_a_model_of_transformers(name: str) -> None:
    labels = fn.labels_of(model_of(name))
    *_, expected, is_fused = HIDDEN[name]
    hidden = {path: label for path, label in labels.items() if label == "hidden"}
    assert {end for end in expected if any(path.endswith(f".{end}") for path in hidden)} == expected
    assert all(path.endswith(tuple(f".{end}" for end in expected)) for path in hidden)
    fused = [path for path, label in hidden.items() if getattr(label, "splits", ())]
    assert [path.rpartition(".")[2] for path in fused] == (["gate_up_proj"] if is_fused else [])


def test_muon_trains_a_mixtral_with_heads_of_their_own() -> None:
    model = model_of("MixtralForCausalLM")
    heads = {name: 4 for name, _ in model.named_parameters() if name.endswith("q_proj.weight")}
    labels = fn.labels_of(model, num_heads=heads)
    opt = fn.Optimizer(model.parameters(), fn.muon, labels=labels, lr=0.02)
    tokens = torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(8):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
