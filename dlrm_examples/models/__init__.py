"""The DLRM and Hammock, in PyTorch and in Keras 3, and what they are trained with.

sizes.py             the sizes of the DLRM, whatever it is written in
tables.py            rows of the embedding tables of the public data sets
dlrm_torch.py        the DLRM in PyTorch; layers_torch.py: cross layers and bags of ids, for DLRM-DCNv2
dlrm_keras.py        the DLRM in Keras; layers_keras.py: looking rows up
hammock.py           two layers over one-hot inputs: sizes, quantiles; hammock_torch.py, hammock_keras.py: the model
gbdt.py              gradient boosted trees on the same rows
multihot.py          how one id becomes a bag of several
lightning_module.py  the models as LightningModules
optimizers_torch.py  Adagrad, also row-wise; optimizers_keras.py: the same in Keras
schedule.py          the learning rate's warm-up and decay
metrics.py, auc.py   AUC, accuracy, log loss
"""
