"""A script as people write it: transformers' Trainer, a tiny GPT-2 from a config, generated tokens."""

import argparse
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--resume")
given = parser.parse_args()


class Tokens(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        start = torch.randint(64, (count, 1), generator=torch.Generator().manual_seed(seed))
        self.rows = (start + torch.arange(16)) % 64

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


set_seed(1)  # torch seeds itself anew in each process
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
model = GPT2LMHeadModel(config)
args = TrainingArguments(
    given.out, max_steps=24, save_steps=5, eval_strategy="steps", eval_steps=6, logging_steps=6, seed=1,
    per_device_train_batch_size=4, gradient_accumulation_steps=2, use_cpu=True, report_to=[], disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model, args, train_dataset=Tokens(203, 1), eval_dataset=Tokens(31, 2))
trainer.train(resume_from_checkpoint=given.resume)
print(trainer.evaluate())
end = {"model": model.state_dict(), "opt": trainer.optimizer.state_dict(), "log": trainer.state.log_history}
torch.save(end, f"{given.out}/end-{os.environ.get('RANK', 0)}.pt")
