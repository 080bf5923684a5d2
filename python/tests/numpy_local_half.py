"""The local half of a step, written plainly with NumPy: the oracle for the built-in one, and an example of
skim.protocols.OwnLocalHalf."""

import pickle

import numpy as np
import skim

LARGEST = {np.dtype(t): np.float32(np.finfo(t).max) for t in (np.float16, np.float32)}


def norm2(x):
    return float(np.sum(x.astype(np.float64) ** 2))


class NumpyLocalHalf:
    """Exact top-k with error feedback. Gradients are NumPy arrays of float32 or float16."""

    def __init__(self):
        self.layout = []
        self.residuals = {}  # [n] of each slot
        self.before = {}  # the journal: residuals before what this step committed

    def set_layout(self, layout):
        kept = self.by_name()
        self.layout = layout
        self.residuals = {}
        for slot, parameters in layout:
            parts = [kept.get(name, np.zeros(n, np.float32)) for name, n in parameters]
            self.residuals[slot] = np.concatenate([*parts, np.zeros(0, np.float32)])

    def by_name(self):
        found = {}
        for slot, parameters in self.layout:
            offset = 0
            for name, n in parameters:
                found[name] = self.residuals[slot][offset : offset + n].copy()
                offset += n
        return found

    def check(self, grad, n):
        if not isinstance(grad, np.ndarray) or grad.dtype not in LARGEST or grad.shape != (n,):
            raise skim.InvalidArgument(f"needs {n} entries of float32 or float16")

    def add(self, task, grad):
        """residual += gradient; the norms of both, and how many entries were no numbers."""
        finite = np.isfinite(grad)
        g = np.where(finite, grad, 0).astype(np.float32) * (np.float32(1) / np.float32(task.scale))
        residual = self.residuals[task.slot]
        residual += g
        return {"total_norm2": norm2(residual), "gradient_norm2": norm2(g), "non_finite": int(np.sum(~finite))}

    def select(self, task, grad):
        found = self.add(task, grad)
        residual = self.residuals[task.slot]
        largest_first = np.argsort(-np.abs(residual), kind="stable")[: task.k]  # of equal ones the lower index
        indices = np.sort(largest_first[np.abs(residual[largest_first]) > 0])
        values = residual[indices]
        threshold = float(np.min(np.abs(values))) if values.size else 0.0
        return indices, values, skim.SelectReport(threshold=threshold, kept_norm2=norm2(values), **found)

    def accumulate(self, task, grad):
        return skim.SelectReport(**self.add(task, grad))

    def whole(self, slot, grad):
        return self.residuals[slot].copy()

    def commit(self, slot, sent, returned):
        residual = self.residuals[slot]
        self.before.setdefault(slot, residual.copy())
        change = -norm2(residual)
        residual[sent[0]] -= sent[1]
        residual[returned[0]] += returned[1]
        return change + norm2(residual)

    def commit_all(self, slot):
        self.before.setdefault(slot, self.residuals[slot].copy())
        self.residuals[slot] = np.zeros_like(self.residuals[slot])

    def apply(self, slot, sum, factor, grad):
        grad[:] = 0
        grad[sum[0]] = self.rounded(sum[1] * np.float32(factor), grad.dtype)
        return bool(np.all(np.isfinite(sum[1])))

    def apply_dense(self, slot, sum, factor, grad):
        grad[:] = self.rounded(sum * np.float32(factor), grad.dtype)
        return bool(np.all(np.isfinite(sum)))

    def rounded(self, x, dtype):
        """What is finite stays finite."""
        largest = LARGEST[dtype]
        return np.where(np.isfinite(x), np.clip(x, -largest, largest), x).astype(dtype)

    def apply_nan(self, grad):
        grad[:1] = np.nan

    def end_step(self):
        self.before.clear()

    def rollback_step(self):
        self.residuals.update(self.before)
        self.before.clear()

    def save(self):
        return pickle.dumps(self.by_name())

    def load(self, of_old_ranks, rank, size, share):
        saved = [pickle.loads(state) for state in of_old_ranks]
        if len(saved) == size:
            mean = saved[rank]
        else:
            mean = {name: sum(np.float32(share) * s[name] for s in saved) for name in saved[0]}
        for slot, parameters in self.layout:
            self.residuals[slot] = np.concatenate([mean[name] for name, _ in parameters])

    def residual(self, slot):
        return self.residuals[slot].copy()
