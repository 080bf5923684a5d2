from skim._core import *  # noqa
from skim._core import __version__
