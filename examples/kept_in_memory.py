import time

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from intune_callbacks import live, pure


@pure
def decode(index):
    time.sleep(0.01)  # a picture is read and decoded
    return np.random.default_rng(index).random((64, 64), np.float32)


class Pictures(Dataset):
    def __len__(self):
        return 800

    def __getitem__(self, index):
        picture = torch.from_numpy(decode(index))
        return picture.flip(0) if torch.rand(()) < 0.5 else picture  # what is random stays behind it


if __name__ == "__main__":
    loader = live(DataLoader(Pictures(), batch_size=16, shuffle=True, num_workers=1))
    for epoch in range(4):
        begin = time.perf_counter()
        for _ in loader:
            time.sleep(0.005)  # a training step
        print(f"epoch {epoch}: {len(loader) * 16 / (time.perf_counter() - begin):.0f} pictures/s")
    loader.close()
