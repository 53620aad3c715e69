"""A script as people write it: accelerate's LocalSGD around a BERT from a small config, on generated data."""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from transformers import BertConfig, BertForSequenceClassification

parser = argparse.ArgumentParser()
parser.add_argument("--out")
out = parser.parse_args().out
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(0)
config = BertConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=16,
)  # fmt: skip
model = BertForSequenceClassification(config)
tokens = torch.randint(1, 64, (210, 12), generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(tokens, (tokens[:, 0] > 32).long())
loader = torch.utils.data.DataLoader(data, batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for _ in range(2):
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8, enabled=True) as local_sgd:
        for rows, labels in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=rows, labels=labels).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
            losses.append(loss.item())
end = {"model": accelerator.unwrap_model(model).state_dict(), "losses": losses}
torch.save(end, f"{out}/end-{os.environ['RANK']}.pt")
accelerator.end_training()
