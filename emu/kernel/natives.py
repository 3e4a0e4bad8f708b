"""Functions of C that the hot path calls, as constants of a compiled module.

A compiled module looks a name that it has imported from elsewhere up in a dict at each use; a
constant of a module that is compiled with it is one load. Interpreted, there is no difference.
"""

from __future__ import annotations

import bisect as _bisect
import functools as _functools
import heapq as _heapq
from typing import Final

bisect_left: Final = _bisect.bisect_left
bisect_right: Final = _bisect.bisect_right
insort: Final = _bisect.insort
heapify: Final = _heapq.heapify
heappop: Final = _heapq.heappop
heappush: Final = _heapq.heappush
heapreplace: Final = _heapq.heapreplace
partial: Final = _functools.partial
