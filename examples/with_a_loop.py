import time

import torch
from torch.utils.data import DataLoader, Dataset

from intune_callbacks import live


class Slow(Dataset):
    def __len__(self):
        return 3200

    def __getitem__(self, index):
        time.sleep(0.004)  # a slow disk
        return torch.full((16,), index / 3200)


def main():
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = live(DataLoader(Slow(), batch_size=16, shuffle=True, num_workers=1))
    for epoch in range(2):
        for batch in loader:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.01)  # the rest of a larger model
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    loader.close()  # prints the card


if __name__ == "__main__":
    main()
