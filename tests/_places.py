"""Where the tests, the examples and the benchmarks lie."""

import pathlib

TESTS = pathlib.Path(__file__).parent
ROOT = TESTS.parent
