"""The transform of DeMo (arXiv 2411.19870): a discrete cosine transform of every parameter, in blocks."""

import math

import torch


def dct_of(size):
    """The orthonormal DCT-II matrix."""
    i = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * i[:, None] * (i + 0.5)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.float()


class Blocks:
    """The DCT of every parameter in blocks of at most 64 x 64, as in DeMo. Parameters of one dimension: of 64."""

    def __init__(self, shape):
        self.shape = (1, shape[0]) if len(shape) == 1 else (shape[0], math.prod(shape[1:]))
        self.block = [max(d for d in range(1, 65) if n % d == 0) for n in self.shape]
        self.rows, self.columns = map(dct_of, self.block)

    def _apply(self, flat, rows, columns):
        (r, c), (h, w) = self.shape, self.block
        blocks = flat.view(r // h, h, c // w, w).transpose(1, 2)
        return (rows @ blocks @ columns.T).transpose(1, 2).reshape(-1)

    def forward(self, flat):
        return self._apply(flat, self.rows, self.columns)

    def back(self, flat):
        return self._apply(flat, self.rows.T, self.columns.T)
