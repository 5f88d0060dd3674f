"""Shared memory that a test leaves behind is told from that of others on the machine by its name."""

import subprocess
import sys
from pathlib import Path
from uuid import uuid4

from asyncrl.lanes.shared_memory import SHARED_MEMORY, Segment, segment_name
from tests.conftest import own_segments

MAKES = "import sys; open(sys.argv[1], 'w').close()"


def made_elsewhere(run: str) -> Path:
    path = SHARED_MEMORY / segment_name(run, 0, "generation0.0-0-1", "rows")
    subprocess.run([sys.executable, "-c", MAKES, str(path)], check=True)
    return path


def test_segments_of_fleets_of_others_are_nobodys_leftover_here(tmp_path: Path) -> None:
    run = uuid4().hex[:8]
    other = uuid4().hex[:8]
    (tmp_path / "deep/run").mkdir(parents=True)
    (tmp_path / "deep/run/run.id").write_text(run)
    (tmp_path / "run.id").touch()
    found = {made_elsewhere(f"{run}0a1b"), made_elsewhere(f"{other}0a1b"), made_elsewhere(uuid4().hex)}
    here = segment_name(uuid4().hex, 0, "test", "rows")
    segment = Segment.create(here, 64)
    try:
        own = own_segments(found | {SHARED_MEMORY / here}, tmp_path)
        assert own == {SHARED_MEMORY / here, *(path for path in found if run in path.name)}
        assert own_segments(found, tmp_path / "elsewhere") == set()
    finally:
        segment.unlink()
        for path in found:
            path.unlink()
