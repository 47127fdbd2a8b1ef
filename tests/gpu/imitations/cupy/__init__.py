"""The little of CuPy that the tests of a real GPU use, in host memory: for their dry run."""

from numpy import arange as arange
from numpy import ndarray as ndarray
from numpy import ones as ones
