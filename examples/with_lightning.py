import time

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset

from intune_callbacks.lightning import InTuneCallback


class Slow(Dataset):
    def __len__(self):
        return 6400

    def __getitem__(self, index):
        time.sleep(0.004)  # a slow disk
        return torch.full((16,), index / 6400)


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def training_step(self, batch, batch_idx):
        time.sleep(0.01)  # the rest of a larger model
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


if __name__ == "__main__":
    loader = DataLoader(Slow(), batch_size=16, num_workers=1)
    trainer = pl.Trainer(max_epochs=1, callbacks=[InTuneCallback()])
    trainer.fit(Model(), train_dataloaders=loader)
