"""The parts of rich that show progress, imported without moving Python's random generator.

``rich.style`` draws a number as it is imported, which would change the random numbers of a script that imports trimtab.
"""

import random

_STATE = random.getstate()

from rich.console import Console  # noqa: E402
from rich.live import Live  # noqa: E402
from rich.text import Text  # noqa: E402

random.setstate(_STATE)

__all__ = ["Console", "Live", "Text"]
