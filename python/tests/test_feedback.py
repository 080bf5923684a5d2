"""Error feedback: residuals that write through, steps that can be taken back, states."""

import gc
import unittest
import weakref

import numpy as np
import skim

LAYOUT = [(0, [("a", 3), ("b", 2)]), (7, [("c", 4)])]


def feedback(layout=LAYOUT, **options):
    f = skim.ErrorFeedback(**options)
    f.set_layout(layout)
    return f


class Residuals(unittest.TestCase):
    def test_write_through(self):
        f = feedback()
        self.assertEqual((f.slots, f.size(0), f.size(7)), ([0, 7], 5, 4))
        f.residual(0)[:] = [1, 2, 3, 4, 5]
        np.testing.assert_array_equal(f.residual(0), [1, 2, 3, 4, 5])
        np.testing.assert_array_equal(f.residual(7), np.zeros(4))

    def test_outlive_the_feedback(self):
        f = feedback()
        r = f.residual(0)
        r[:] = 3
        part = r[1:4]
        alive = weakref.ref(r)
        del f, r
        gc.collect()
        np.testing.assert_array_equal(part, [3, 3, 3])
        self.assertIsNotNone(alive())  # by its part
        del part
        gc.collect()
        self.assertIsNone(alive())

    def test_memory_does_not_move_under_an_array(self):
        f = feedback()
        r = f.residual(0)
        state = f.save()
        for move in (lambda: f.set_layout(LAYOUT), lambda: f.load([state], rank=0, size=1)):
            with self.assertRaisesRegex(BufferError, "arrays of residuals are in use \\(1\\)"):
                move()
        del r
        f.set_layout(LAYOUT)

    def test_move_with_the_names_of_parameters(self):
        f = feedback()
        f.residual(0)[:] = [1, 2, 3, 4, 5]
        f.set_layout([(1, [("b", 2), ("d", 1), ("a", 3)])])
        np.testing.assert_array_equal(f.residual(1), [4, 5, 0, 1, 2, 3])

    def test_off(self):
        f = feedback(feedback=False)
        self.assertEqual(f.residual(0).size, 0)
        self.assertEqual(f.commit(0, np.array([1]), np.array([1.0])), 0.0)


class Steps(unittest.TestCase):
    def test_commit_and_rollback(self):
        f = feedback()
        f.residual(0)[:] = [1, 2, 3, 4, 5]
        change = f.commit(0, np.array([1, 3]), np.array([2.0, 1.0]), returned=(np.array([0]), np.array([1.0])))
        np.testing.assert_array_equal(f.residual(0), [2, 0, 3, 3, 5])
        self.assertEqual(change, (4 + 9 + 9 + 25) - (1 + 4 + 9 + 16 + 25))
        f.rollback_step()
        np.testing.assert_array_equal(f.residual(0), [1, 2, 3, 4, 5])
        f.commit(0, np.array([0]), np.array([1.0]))
        f.end_step()
        f.rollback_step()
        np.testing.assert_array_equal(f.residual(0), [0, 2, 3, 4, 5])

    def test_a_dense_delivery_empties_the_slot_at_the_end(self):
        f = feedback()
        f.residual(7)[:] = 1
        f.commit_all(7)
        np.testing.assert_array_equal(f.residual(7), np.ones(4))
        f.end_step()
        np.testing.assert_array_equal(f.residual(7), np.zeros(4))

    def test_momentum_takes_the_place_of_the_gradient(self):
        f = feedback(momentum_correction=0.5)
        g = np.array([2, 0, 0, 0, 4], np.float32)
        for expected in (g, 1.5 * g):
            u, scale = f.begin(0, g, scale=1.0)
            np.testing.assert_array_equal(u, expected)
            np.testing.assert_array_equal(f.velocity(0), expected)
            self.assertEqual(scale, 1.0)
            f.commit(0, np.array([], np.int64), np.array([]))
            f.end_step()
        f.commit(0, np.array([4]), np.array([4.0]))  # delivered: its velocity is masked
        np.testing.assert_array_equal(f.velocity(0), [3, 0, 0, 0, 0])

    def test_clipping_changes_the_scale(self):
        f = feedback(local_clip=1.0)
        g = np.full(5, 2, np.float32)
        u, scale = f.begin(0, g, norm2=20.0, ranks=4)
        self.assertIs(u, g)
        # 5 of the 9 entries of the model, and 4 ranks.
        self.assertAlmostEqual(scale, 20**0.5 / (5 / (4 * 9)) ** 0.5, places=5)


    def test_what_is_no_gradient_is_refused(self):
        f = feedback()
        for wrong in ("abc", [1.0] * 5, np.ones((5, 1), np.float32)):
            with self.assertRaisesRegex(TypeError, "^begin: grad must be an array of one dimension"):
                f.begin(0, wrong)


class States(unittest.TestCase):
    def test_come_back(self):
        f, g = feedback(), feedback()
        f.residual(7)[:] = [1, 2, 3, 4]
        g.load([f.save()], rank=0, size=1)
        np.testing.assert_array_equal(g.residual(7), [1, 2, 3, 4])

    def test_another_number_of_ranks(self):
        old = [feedback(), feedback()]
        for rank, f in enumerate(old):
            f.residual(0)[:] = [rank + 1, 0, 0, 0, 6]
        f = feedback()
        f.load([f.save() for f in old], rank=0, size=3)
        np.testing.assert_array_equal(f.residual(0), [1.5, 0, 0, 0, 6])

    def test_damage_changes_nothing(self):
        f = feedback()
        f.residual(0)[:] = 1
        state = bytearray(f.save())
        state[-1] ^= 1
        for bad in (bytes(state), bytes(state[:-1]), feedback([(0, [("a", 4)])]).save()):
            with self.assertRaises(skim.StateError):
                f.load([bad], rank=0, size=1)
        np.testing.assert_array_equal(f.residual(0), np.ones(5))


class Mistakes(unittest.TestCase):
    def test_are_named(self):
        f = feedback()
        one = np.array([1.0])
        for why, call in (
            ("slot 3 is not in the layout", lambda: f.residual(3)),
            ("'a' stands twice", lambda: f.set_layout([(0, [("a", 1), ("a", 1)])])),
            ("'a' has 4 entries, before 3", lambda: f.set_layout([(0, [("a", 4)])])),
            (r"commit: index 5 \(entry 0\) is not in \[0, 5\)", lambda: f.commit(0, np.array([5]), one)),
            ("commit: returned: 1 indices, but 2",
             lambda: f.commit(0, np.array([1]), one, returned=(np.array([1]), np.ones(2)))),
            ("momentum_correction: must be a number in", lambda: feedback(momentum_correction=1.0)),
        ):
            with self.subTest(why=why), self.assertRaisesRegex(skim.InvalidArgument, why):
                call()


if __name__ == "__main__":
    unittest.main()
