"""Ranks as threads: the reducer keeps its laws through Python's arrays."""

import gc
import unittest
import weakref

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


class Options(unittest.TestCase):
    """Keywords that the library's list of options makes."""

    def setUp(self):
        self.comm = skim.in_process_group(1)[0]

    def test_what_was_given_is_what_counts(self):
        given = {
            "select": "dgc", "select_seed": 2**63 + 1, "per_parameter": True, "value_code": "q4", "index_code": "raw32",
            "exchange": "hierarchical", "between": "gtopk", "server": "sharded", "momentum_correction": 0.9,
            "residual_decay": 0.95, "dense_below": 7, "non_finite": "raise",
        }  # fmt: skip
        options = skim.Reducer(self.comm, **given).options
        self.assertEqual({name: options[name] for name in given}, given)
        self.assertEqual(skim.Reducer(self.comm, **options).options, options)
        automatic = skim.Reducer(self.comm, exchange="auto", among=["gtopk", "dense"], trial_share=0).options
        self.assertEqual([automatic[n] for n in ("exchange", "among", "trial_share")], ["auto", ("gtopk", "dense"), 0.0])

    def test_defaults_are_the_librarys(self):
        defaults = skim.Reducer(self.comm).options
        self.assertEqual([defaults[n] for n in ("select", "exchange", "index_code", "residual_decay", "feedback")],
                         ["exact", "allgather", "auto", 1.0, True])  # fmt: skip
        self.assertEqual(skim.Reducer(self.comm, **{n: v for n, v in defaults.items() if n not in (
            "among", "trial_share")}).options, defaults)  # fmt: skip

    def test_help_and_signature_have_all(self):
        text = skim.Reducer.__init__.__doc__
        for name in skim.Reducer(self.comm).options:
            self.assertRegex(text, rf"\n  {name}  ")
            self.assertRegex(text, rf"[ (]{name}: ")

    def test_wrong_ones_get_one_line(self):
        for why, options in (
            ("skim.Reducer: no option 'value_cod'; did you mean 'value_code'[?]", {"value_cod": "q4"}),
            ("skim.Reducer: no option 'xyzzy'; there are: select, ", {"xyzzy": 1}),
            ("value_code: must be one of f32, .*, not 4", {"value_code": 4}),
            ("value_code: no 'q5'; there are: f32, ", {"value_code": "q5"}),
            ("inside: no 'hierarchical'; there are: ", {"exchange": "hierarchical", "inside": "hierarchical"}),
            ("per_parameter: must be True or False, not 1", {"per_parameter": 1}),
            ("dense_below: must be a whole number >= 0, not -1", {"dense_below": -1}),
            ("dense_below: must be a whole number >= 0, not 1.5", {"dense_below": 1.5}),
            ("dense_below: must be a whole number >= 0, not True", {"dense_below": True}),
            (r"residual_decay: must be a number in \[0, 1\], not 2", {"residual_decay": 2}),
            (r"residual_decay: must be a number in \[0, 1\], not 'x'", {"residual_decay": "x"}),
            (r"residual_decay: must be a number in \[0, 1\], not nan", {"residual_decay": float("nan")}),
            ("residual_decay: .*, not None", {"residual_decay": None}),
            (r"momentum_correction: must be a number in \[0, 1\), not 1.0", {"momentum_correction": 1.0}),
            ("link: must be a skim.Link or None, not 3", {"exchange": "auto", "link": 3}),
            ("local_speeds: must be a skim.LocalSpeeds, not None", {"exchange": "auto", "local_speeds": None}),
            ("trial_share: needs exchange='auto'", {"trial_share": 0.5}),
            ("density: must be a number .*, not True", {"density": True}),
            ("density: must be a number .*, not None", {"density": None}),
        ):
            with self.subTest(why=why), self.assertRaisesRegex(skim.InvalidArgument, f"^{why}[^\n]*$"):
                skim.Reducer(self.comm, **options)


class Listeners(unittest.TestCase):
    def test_one_that_refers_to_the_reducer_keeps_nothing(self):
        class Owner:
            def __init__(self):
                self.phases = []
                self.reducer = skim.Reducer(skim.in_process_group(1)[0], dense_below=0)
                self.reducer.set_layout([(0, [("w", 50)])])
                self.reducer.reduce(0, np.ones(50, np.float32), on_phase=self.hear)

            def hear(self, phase):
                self.phases.append(phase)

        owner = Owner()
        self.assertTrue(owner.phases)
        owner = weakref.ref(owner)
        gc.collect()
        self.assertIsNone(owner())


class Errors(unittest.TestCase):
    def test_names_that_do_not_exist(self):
        with self.assertRaisesRegex(ValueError, "exchange: no 'ring'; there are: dense, allgather, "):
            skim.Reducer(skim.in_process_group(1)[0], exchange="ring")
        with self.assertRaisesRegex(skim.Error, "select: no 'topk'; there are: exact, "):
            skim.Selector("topk")

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
