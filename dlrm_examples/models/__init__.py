"""The DLRM, in PyTorch and in Keras 3, and what it is trained with.

sizes.py             the sizes of the model, whatever it is written in
tables.py            rows of the embedding tables of the public data sets
dlrm_torch.py        the model in PyTorch; layers_torch.py: cross layers and bags of ids, for DLRM-DCNv2
dlrm_keras.py        the model in Keras
multihot.py          how one id becomes a bag of several
lightning_module.py  the model as a LightningModule
optimizers_torch.py  Adagrad, also row-wise; optimizers_keras.py: the same in Keras
schedule.py          the learning rate's warm-up and decay
metrics.py, auc.py   AUC, accuracy, log loss
"""
