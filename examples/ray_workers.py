import time

import torch
from torch.utils.data import DataLoader, Dataset

from intune_callbacks import live


class Slow(Dataset):
    def __len__(self):
        return 12800

    def __getitem__(self, index):
        begin = time.process_time()
        while time.process_time() - begin < 0.001:  # decoding, hashing, joining
            pass
        return torch.full((16,), index / 12800)


def main():
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    # The cluster is the one that RAY_ADDRESS=host:port names; docs/cluster.md starts one.
    loader = live(DataLoader(Slow(), batch_size=32, shuffle=True, num_workers=1), workers_kind="ray")
    for epoch in range(3):
        for batch in loader:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    loader.close()  # prints the card


if __name__ == "__main__":
    main()
