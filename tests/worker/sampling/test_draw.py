"""Random numbers: published values, independent keys, and the distribution of the exponentials."""

import numpy as np

from raylm.worker.sampling.draw import exponentials, nth_output, stream_states
from tests.worker.sampling.sampler_reference import exponential


def test_published_outputs_of_splitmix64() -> None:
    # The first outputs at state 1234567, as published for the C reference code.
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert nth_output(np.array([1234567], np.uint64), np.arange(5, dtype=np.uint64)).tolist() == expected


def test_exponentials_equal_those_of_plain_integers() -> None:
    seeds = np.array([0, 1, -1, -(2**63), 2**63 - 1, 123456789])
    positions = np.array([0, 1, 2, 131071, 7, 2**31 - 1], np.int32)
    indexes = [0, 1, 511, 151935, 2**32, 2**32 + 296]
    got = exponentials(stream_states(seeds, positions), np.array(indexes))
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        np.testing.assert_allclose(got[row], [exponential(seed, position, index) for index in indexes], rtol=1e-14)


def test_exponentials_are_distributed_as_such() -> None:
    seeds, positions = np.meshgrid(np.arange(40), np.arange(40, dtype=np.int32))
    indexes = np.concatenate([np.arange(300), np.arange(2**32, 2**32 + 300)])
    values = exponentials(stream_states(seeds.ravel(), positions.ravel()), indexes)
    uniform = np.sort(-np.expm1(-values.ravel()))
    distance = np.abs(uniform - (np.arange(uniform.size) + 0.5) / uniform.size).max()
    assert distance < 2.2 / np.sqrt(uniform.size), "Kolmogorov-Smirnov at 1e-4"
    assert values.min() > 0
    assert np.isfinite(values).all()
    assert np.unique(values).size == values.size
    # Neighbouring positions, seeds and indexes are not correlated, nor are tokens and blocks.
    cube = values.reshape(40, 40, 2, 300)
    for axis in range(4):
        a = np.take(cube, range(cube.shape[axis] - 1), axis).ravel()
        b = np.take(cube, range(1, cube.shape[axis]), axis).ravel()
        assert abs(np.corrcoef(a, b)[0, 1]) < 4.5 / np.sqrt(a.size)
