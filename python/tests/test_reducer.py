"""Ranks as threads: the reducer keeps its laws through Python's arrays."""

import unittest

import numpy as np
import skim
from ranks import on_ranks


class Reducing(unittest.TestCase):
    @staticmethod
    def parts():
        """Parts of a reducer in place of the built-in ones: test_local_half.py."""
        return {}

    def test_mass_is_conserved_bit_by_bit(self):
        n, steps = 20_000, 4
        for ranks in (1, 2, 3):
            for kind in ("allgather", "gtopk", "gtopk-tree", "oktopk", "param-server", "auto"):
                with self.subTest(ranks=ranks, kind=kind):
                    given = np.zeros(n)
                    delivered = np.zeros(n)

                    def train(rank, comm):
                        reducer = skim.Reducer(comm, density=0.01, exchange=kind, **self.parts())
                        reducer.set_layout([(0, [("w", n)])])
                        rng = np.random.default_rng(rank)
                        mine, got = np.zeros(n), np.zeros(n)
                        for _ in range(steps):
                            g = rng.integers(-1000, 1000, n).astype(np.float32) * ranks
                            mine += g
                            reducer.reduce(0, g)
                            self.assertTrue(reducer.end_step())
                            got += g
                        # What is left comes out of a sum at density 1.
                        dense = skim.Reducer(comm, density=1.0, **self.parts())
                        dense.set_layout([(0, [("w", n)])])
                        dense.load([np.frombuffer(s, np.uint8) for s in comm.allgather(reducer.save())])
                        rest = np.zeros(n, np.float32)
                        dense.reduce(0, rest)
                        return mine, got + rest

                    results = on_ranks(skim.in_process_group(ranks), train)
                    given = sum(r[0] for r in results)
                    for _, delivered in results:
                        np.testing.assert_array_equal(delivered * ranks, given)

    def test_types_of_gradients(self):
        reducer = skim.Reducer(skim.in_process_group(1)[0])
        reducer.set_layout([(0, [("w", 3)])])
        half = np.array([1, -2, 3], np.float16)
        reducer.reduce(0, half)
        np.testing.assert_array_equal(half, np.array([1, -2, 3], np.float16))
        reducer.end_step()
        with self.assertRaisesRegex(ValueError, "float32, float16 or bfloat16"):
            reducer.reduce(0, np.zeros(3))
        with self.assertRaisesRegex(skim.InvalidArgument, "has 4 entries, its layout 3"):
            reducer.reduce(0, np.zeros(4, np.float32))


    def test_arrays_that_would_be_copied_are_refused(self):
        comm = skim.in_process_group(1)[0]
        reducer = skim.Reducer(comm)
        reducer.set_layout([(0, [("w", 3)])])
        read_only = np.zeros(3, np.float32)
        read_only.flags.writeable = False
        for grad in (np.zeros(6, np.float32)[::2], read_only):
            with self.assertRaises(TypeError):
                reducer.reduce(0, grad)
        for data in (np.zeros(3), np.zeros(6, np.float32)[::2]):
            with self.assertRaises(TypeError):
                comm.allreduce_sum(data)


class Errors(unittest.TestCase):
    def test_names_that_do_not_exist(self):
        with self.assertRaisesRegex(ValueError, "exchange: no 'ring'; there are: dense, allgather, "):
            skim.ExchangeOptions("ring")
        with self.assertRaisesRegex(skim.Error, "select: no 'topk'; there are: exact, "):
            skim.SelectOptions("topk")

    def test_a_failure_names_the_rank(self):
        group = skim.in_process_group(2)

        def run(rank, comm):
            if rank == 1:
                comm.abort(1)
                return None
            with self.assertRaises(skim.CommError) as caught:
                comm.barrier()
            return caught.exception

        e = on_ranks(group, run)[0]
        self.assertEqual(e.peer, 1)
        self.assertIn("rank 1", str(e))

    def test_a_damaged_state(self):
        reducer = skim.Reducer(skim.in_process_group(1)[0])
        reducer.set_layout([(0, [("w", 3)])])
        state = bytearray(reducer.save())
        state[20] ^= 1
        with self.assertRaises(skim.StateError):
            reducer.load([np.frombuffer(state, np.uint8)])


if __name__ == "__main__":
    unittest.main()
