"""The programs in the guides run as written, with a model that was made before."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from watching import PATIENCE

GUIDES = Path(__file__).parents[2] / "docs" / "guides"

pytestmark = pytest.mark.fleet


@pytest.mark.parametrize("name", ["python.md", "from-trl.md"])
def test_programs_of_guides_run(name: str, quickstart_model: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (GUIDES / name).read_text(), re.DOTALL)
    (program,) = [block for block in blocks if "asyncrl.train(" in block]
    (tmp_path / "guide.py").write_text(program.replace("warmed:reverse", str(quickstart_model)))
    done = subprocess.run([sys.executable, "guide.py"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    shown = done.stdout.strip().splitlines()
    assert re.search(r"\d\.\d", shown[-1] if name == "from-trl.md" else "".join(shown[-4:]))
