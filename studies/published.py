"""The papers' published numbers, to compare with those measured here."""

# Parameters, and seconds of forward + backward of a batch on one NVIDIA P102-100, as S. Shi et al.
# publish them with the code of "Communication-Efficient Distributed Deep Learning with Merged Gradient
# Sparsification on GPUs", INFOCOM 2020. VGG-16 is that for CIFAR-10, the LSTM that for PTB.
MODELS = {"VGG-16": (14.7e6, 0.0523), "ResNet-50": (25.6e6, 0.21), "Inception-v4": (42.7e6, 0.829),
          "LSTM-PTB": (66.0e6, 0.2069)}

# Parameters as PyTorch counts them in these networks (VGG-16 and ResNet-20 for CIFAR-10, AlexNet and ResNet-50 for
# ImageNet, a two-layer LSTM for PTB), and seconds of a step without exchange: batch size over the samples per second
# of a single worker, as published with the code of S. Shi et al., "A Distributed Synchronous SGD Algorithm with
# Global Top-k Sparsification for Low Bandwidth Networks", arXiv 1901.04359.
SCALED_MODELS = {"vgg16": (14_728_266, 128 / 1317.333), "resnet20": (269_722, 128 / 920.632),
                 "alexnet": (61_100_840, 64 / 173.469), "resnet50": (25_557_032, 256 / 52.873),
                 "lstm-ptb": (66_034_000, 100 / 392.0)}

# Scaling efficiency in per cent at PUBLISHED_RANKS, for dense, topk (all-gather) and gtopk: throughput of a worker
# over that of one alone, from the same source.
PUBLISHED_RANKS = [4, 8, 16, 32]
PUBLISHED = {
    "vgg16": {"dense": [7.9, 7.0, 3.0, 1.0], "allgather": [8.4, 8.3, 7.4, 4.8], "gtopk": [9.9, 9.9, 9.6, 9.4]},
    "resnet20": {"dense": [89.3, 76.6, 56.5, 31.3], "allgather": [98.7, 81.8, 80.1, 75.6],
                 "gtopk": [99.5, 94.4, 87.8, 85.7]},
    "alexnet": {"dense": [8.1, 7.0, 2.8, 0.7], "allgather": [8.2, 8.0, 7.7, 5.3], "gtopk": [9.5, 9.5, 9.4, 9.1]},
    "resnet50": {"dense": [73.8, 70.0, 43.8, 20.3], "allgather": [71.4, 67.5, 65.2, 57.8],
                 "gtopk": [75.3, 75.1, 73.9, 74.0]},
    "lstm-ptb": {"dense": [3.2, 2.2, 1.0, 0.5], "allgather": [5.1, 4.7, 3.8, 1.4], "gtopk": [4.5, 4.5, 3.9, 2.8]},
}


def published(model, exchange, ranks):
    """Per cent, or None."""
    of = PUBLISHED.get(model, {}).get(exchange)
    return of[PUBLISHED_RANKS.index(ranks)] if of and ranks in PUBLISHED_RANKS else None


# Final test accuracy in per cent, and how many times fewer entries the server sends than the union of what it got, as
# published with the code of W. Zou, H. De Sterck and J. Liu, "Downlink Compression Improves TopK Sparsification",
# arXiv 2209.15203. Repeated runs where there are some, without the one that the rate was chosen by; of shards the
# least and the most.
ZOU_RUNS = {  # (task, split, ranks): sgd, uni, bi
    ("mnist-mlp", "partition", 10): ([97.75, 97.72, 97.71], [97.68, 97.51, 97.72], [97.52, 97.68, 97.51]),
    ("mnist-mlp", "partition", 20): ([97.68, 97.73, 97.70], [97.33, 97.58, 97.57], [97.71, 97.48, 97.71]),
    ("mnist-mlp", "partition", 50): ([97.73, 97.77, 97.47], [97.68, 97.68, 97.77], [97.41, 97.46, 97.58]),
    ("mnist-mlp", "partition", 100): ([97.61, 97.72, 97.66], [97.49, 97.47, 97.53], [97.47, 97.31, 97.36]),
    ("mnist-mlp", "shards", 100): ([97.53], [97.38, 97.63], [97.22, 97.58]),
    ("fashion-mlp", "partition", 20): ([88.13], [89.20, 88.86, 88.63, 89.23], [88.93, 89.03, 88.80, 88.60]),
    ("fashion-mlp", "partition", 50): ([89.64], [88.47, 88.67, 89.06, 88.84], [88.21, 88.91, 88.53, 88.91]),
    ("fashion-mlp", "partition", 100): ([87.96], [88.59, 88.67, 88.76, 88.19], [88.21, 88.66, 88.65, 88.72]),
    ("fashion-mlp", "shards", 100): ([88.97], [87.50, 88.85], [87.66, 88.40]),
    ("mnist-cnn", "partition", 20): ([99.21], [99.24, 99.19, 99.24], [99.28, 99.31, 99.25]),
    ("mnist-cnn", "partition", 100): ([99.10], [99.05, 99.02, 99.12], [99.12, 99.15, 99.14]),
    ("fashion-cnn", "partition", 20): ([90.48], [90.13], [90.35]),
    ("fashion-cnn", "partition", 100): ([90.08], [90.51], [90.77]),
}
ZOU_SWEEP = {  # k_down/n of bi on 100 ranks
    "mnist-mlp": {1e-4: 96.61, 5e-4: 97.21, 2e-3: 97.35, 5e-3: 97.56, 1e-2: 97.52},
    "fashion-mlp": {1e-4: 88.38, 5e-4: 88.77, 5e-3: 89.01, 1e-2: 88.35},
}
ZOU_SAVING = {  # of bi by ranks
    "mnist-mlp": {10: 10.3, 20: 20.2, 50: 48.6, 100: 90.7},
    "fashion-mlp": {20: 19.5, 50: 45.2, 100: 80.5},
    "mnist-cnn": {20: 19.3, 100: 77.2},
    "fashion-cnn": {100: 97.4},
}
ZOU_UNION = {  # of bi by ranks: indices that any rank sent, in per cent of all that the ranks sent
    "mnist-mlp": {10: 98.6, 20: 97.4, 50: 94.5, 100: 88.9},
}
ZOU_METHODS = ["sgd", "uni", "bi"]


def zou_accuracy(task, split, ranks, method, down):
    """The published ones; none: []."""
    if method == "bi" and down != 0.001:
        known = ZOU_SWEEP.get(task, {}).get(down) if (split, ranks) == ("partition", 100) else None
        return [known] if known else []
    return ZOU_RUNS.get((task, split, ranks), ([], [], []))[ZOU_METHODS.index(method)]
