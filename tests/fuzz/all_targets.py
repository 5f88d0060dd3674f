"""All targets by name."""

from collections.abc import Callable

from tests.fuzz.host_targets import HOSTS
from tests.fuzz.targets import TARGETS as LANES
from tests.fuzz.targets import Target
from tests.fuzz.text_targets import TEXTS

TARGETS: dict[str, Callable[[], Target]] = {**LANES, **HOSTS, **TEXTS}
