"""Frames: what is encoded comes back, and nothing else is taken for one."""

import unittest

import numpy as np
import skim


def selection(n, k, seed):
    rng = np.random.default_rng(seed)
    indices = np.sort(rng.choice(n, k, replace=False))
    return indices, rng.standard_normal(k).astype(np.float32)


class Frames(unittest.TestCase):
    def test_come_back_bit_by_bit(self):
        for value in skim.value_codes:
            for index in ("auto", *skim.index_codes):
                for n, k in ((10, 0), (1, 1), (1000, 1000), (100_000, 777)):
                    with self.subTest(value=value, index=index, n=n, k=k):
                        codec = skim.Codec(index_code=index, value_code=value)
                        indices, values = selection(n, k, seed=k)
                        values = codec.quantize(values)
                        frame = codec.encode(indices, values, n)
                        self.assertLessEqual(len(frame), codec.max_encoded_bytes(k, n))
                        got_indices, got_values = codec.decode(frame, n)
                        np.testing.assert_array_equal(got_indices, indices)
                        np.testing.assert_array_equal(got_values.view(np.uint32), values.view(np.uint32))

    def test_rounding(self):
        values = np.array([1.0, 1 / 3, -2.7e5, 1e-9], np.float32)
        half = skim.Codec(value_code="f16").quantize(values)
        np.testing.assert_array_equal(half, np.clip(values, -65504, 65504).astype(np.float16).astype(np.float32))
        np.testing.assert_array_equal(skim.Codec().quantize(values), values)

    def test_stochastic_rounding_draws_by_step_slot_and_stream(self):
        codec = skim.Codec(value_code="bf16", rounding="stochastic", rounding_seed=7)
        values = np.full(4000, 1 + 2**-9, np.float32)  # a quarter of the way between two neighbours
        first = codec.quantize(values, step=1, slot=2, stream=3)
        np.testing.assert_array_equal(first, codec.quantize(values, step=1, slot=2, stream=3))
        np.testing.assert_array_equal(first, codec.quantize(first, step=1, slot=2, stream=3))
        for other in ({"step": 2, "slot": 2, "stream": 3}, {"step": 1, "slot": 1, "stream": 3},
                      {"step": 1, "slot": 2, "stream": 4}):
            self.assertTrue(np.any(first != codec.quantize(values, **other)))
        self.assertAlmostEqual(float(first.mean()), 1 + 2**-9, delta=5 * 2**-7 * 0.44 / 4000**0.5)

    def test_indices_of_any_integers(self):
        codec = skim.Codec()
        frames = {
            codec.encode(np.array([1, 4], t), np.array([1.0, 2.0]), 5)
            for t in (np.int32, np.uint32, np.int64, np.uint64)
        }
        self.assertEqual(len(frames), 1)


class Mistakes(unittest.TestCase):
    def test_are_named(self):
        codec, one = skim.Codec(), np.ones(2, np.float32)
        for indices, why in (
            (np.array([1, 5]), r"index 5 \(entry 1\) is not in \[0, 5\)"),
            (np.array([-1, 2]), r"index -1 \(entry 0\) is not in"),
            (np.array([2, 2]), r"must ascend, each once \(entry 1 is 2, after 2\)"),
            (np.array([1]), "1 indices, but 2 values"),
            (np.array([0.0, 1.0]), "must be integers"),
        ):
            with self.subTest(why=why), self.assertRaisesRegex(skim.InvalidArgument, why):
                codec.encode(indices, one, 5)

    def test_bytes_that_are_no_frame(self):
        codec = skim.Codec()
        frame = codec.encode(np.array([1, 4]), np.array([1.0, 2.0], np.float32), 5)
        damaged = bytearray(frame)
        damaged[-1] ^= 1
        for given, n, why in (
            (b"", 5, "truncated"),
            (b"x" * 100, 5, "not a frame"),
            (frame[:-1], 5, "truncated"),
            (frame, 6, "dense length expected 6"),
            (bytes(damaged), 5, "checksum"),
            (frame + b"x", 5, "bytes after the frame"),
        ):
            with self.subTest(why=why), self.assertRaisesRegex(skim.DecodeError, why) as caught:
                codec.decode(given, n)
            self.assertIsInstance(caught.exception, ValueError)
            self.assertIsInstance(caught.exception, skim.Error)

    def test_any_damage_is_noticed_or_harmless(self):
        codec = skim.Codec()
        indices, values = selection(1000, 50, seed=1)
        frame = codec.encode(indices, values, 1000)
        for at in range(len(frame)):
            damaged = bytearray(frame)
            damaged[at] ^= 1 << at % 8
            with self.assertRaises(skim.DecodeError):
                codec.decode(bytes(damaged), 1000)


if __name__ == "__main__":
    unittest.main()
