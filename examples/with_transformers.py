import tempfile
import time

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from intune_callbacks.transformers import InTuneCallback


class Slow(Dataset):
    def __len__(self):
        return 3200

    def __getitem__(self, index):
        time.sleep(0.004)  # a slow disk
        return {"x": torch.full((16,), index / 3200)}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def forward(self, x):
        time.sleep(0.01)  # the rest of a larger model
        return {"loss": self.layer(x).square().mean()}


if __name__ == "__main__":
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=16,
        num_train_epochs=2,
        dataloader_num_workers=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = Trainer(Model(), arguments, train_dataset=Slow(), callbacks=[InTuneCallback()])
    trainer.train()
